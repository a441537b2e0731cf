"""Settings from files and the environment, with where each came from.

A flag beats an `OMNI_*` variable, that beats `--config` or `./omni.toml`, that beats
`$XDG_CONFIG_HOME/omni/config.toml`, that beats the default. In a file, keys are options; those at
the top go for every command that has them, those in `[respond]` for that command, and those in
`[profile.NAME]` (and `[profile.NAME.respond]`) when the profile is chosen. Unknown keys are errors.
"""

import inspect
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from omnicli.errors import UserError

PREFIX = "OMNI_"
OTHER_VARIABLES = ("cache", "test_faults", "config", "profile")  # that are no options, or not only
NOT_IN_FILES = ("config", "profile", "inputs", "source")
SECRETS = ("ping_url",)
_KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
}
NEAR = 0.8  # so alike is a variable's name to one of ours that it is taken for a slip

Commands = Mapping[str, Callable[..., None]]
Table = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it came from."""

    value: Any
    origin: str


@dataclass(slots=True)
class Settings:
    """Command -> option -> setting."""

    by_command: dict[str, dict[str, Setting]] = field(default_factory=dict)

    def default_map(self) -> dict[str, dict[str, Any]]:
        """As click takes them in place of defaults."""
        return {
            command: {name: setting.value for name, setting in found.items()}
            for command, found in self.by_command.items()
        }


def options_of(command: Callable[..., None]) -> dict[str, inspect.Parameter]:
    """A command's options by their Python names."""
    return dict(inspect.signature(command).parameters)


def read_settings(commands: Commands, environ: Mapping[str, str], args: Sequence[str]) -> Settings:
    """All settings but the flags; raises UserError for keys that do not exist."""
    settings = Settings({name: {} for name in commands})
    profile = given(args, "--profile") or environ.get("OMNI_PROFILE")
    known = False
    for path in _files(environ, args):
        known |= _take_file(settings, commands, path, profile)
    if profile and not known:
        raise UserError(f"no profile {profile!r}", hint="a table [profile.NAME] in the settings")
    _take_environment(settings, commands, environ)
    return settings


def given(args: Sequence[str], option: str) -> str | None:
    """An option's value on the command line, before it is parsed."""
    before = list(args[: list(args).index("--")]) if "--" in args else list(args)
    for i, arg in enumerate(before):
        if arg.startswith(f"{option}="):
            return arg.partition("=")[2]
        if arg == option and i + 1 < len(before):
            return before[i + 1]
    return None


def _files(environ: Mapping[str, str], args: Sequence[str]) -> Iterator[Path]:
    """The weakest first."""
    home = environ.get("XDG_CONFIG_HOME") or (
        f"{environ['HOME']}/.config" if environ.get("HOME") else None
    )
    if home and os.path.isfile(own := f"{home}/omni/config.toml"):  # noqa: PTH113 - or not readable
        yield Path(own)
    named = given(args, "--config") or environ.get("OMNI_CONFIG")
    if named:
        if not Path(named).is_file():
            raise UserError(f"no settings at {named}")
        yield Path(named)
    elif Path("omni.toml").is_file():
        yield Path("omni.toml")


# -- files


def _take_file(settings: Settings, commands: Commands, path: Path, profile: str | None) -> bool:
    """Take a file in; whether it has the profile."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from error
    profiles = table.pop("profile", {})
    if not isinstance(profiles, dict) or not all(isinstance(p, dict) for p in profiles.values()):
        raise UserError(f"{path}: profiles are tables: [profile.NAME]")
    place = _Place(path)
    _take_tables(settings, commands, place, table)
    for name, inner in profiles.items():  # those that are not chosen are checked too
        chosen = settings if name == profile else Settings({c: {} for c in commands})
        _take_tables(chosen, commands, place.inside(f"profile.{name}"), inner)
    return profile in profiles


@dataclass(frozen=True, slots=True)
class _Place:
    """A table of a file, for messages and as the origin of its values."""

    path: Path
    table: str = ""

    def inside(self, name: str) -> "_Place":
        """A table of this table."""
        return _Place(self.path, f"{self.table}.{name}" if self.table else name)

    def __str__(self) -> str:
        return f"{self.path} [{self.table}]" if self.table else str(self.path)


def _take_tables(settings: Settings, commands: Commands, place: _Place, table: Table) -> None:
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    plain = {key: value for key, value in table.items() if key not in tables}
    _take_keys(settings, commands, commands, place, plain)
    for key, inner in tables.items():
        if key not in commands:
            raise UserError(f"{place}: no table [{key}]", hint=_near(key, commands))
        _take_keys(settings, commands, {key: commands[key]}, place.inside(key), inner)


def _take_keys(
    settings: Settings, commands: Commands, meant: Commands, place: _Place, table: Table
) -> None:
    """Keys that go for all of the `meant` commands that have them."""
    names = {name for command in meant.values() for name in options_of(command)}
    for key, value in table.items():
        name = _checked(key, names, place, commands)
        for command, function in meant.items():
            if name in options_of(function):
                kind = _kind(options_of(function)[name].annotation)
                fitted = _fitted(name, value, kind, place)
                settings.by_command[command][name] = Setting(fitted, str(place))


def _checked(key: str, names: set[str], place: _Place, commands: Commands) -> str:
    """The option that a key means."""
    name = key.replace("-", "_")
    if name in names and name not in NOT_IN_FILES:
        return name
    elsewhere = [c for c, f in commands.items() if name in options_of(f)]
    if name in NOT_IN_FILES or not elsewhere:
        shown = [n.replace("_", "-") for n in names if n not in NOT_IN_FILES]
        raise UserError(f"{place}: no setting {key!r}", hint=_near(key, shown))
    raise UserError(f"{place}: no setting {key!r} there", hint=f"it belongs to {elsewhere[0]}")


def _near(key: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    near = get_close_matches(key.replace("_", "-"), list(known), n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"


def _kind(annotation: Any) -> Any:
    """`Annotated[int | None, ...]` -> int; list[str] -> list."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(a for a in get_args(annotation) if a is not type(None))
    return get_origin(annotation) or annotation


def _fitted(name: str, value: Any, kind: Any, place: _Place) -> Any:
    """The value as the option takes it; paths start from the file's folder."""
    if kind is Path and isinstance(value, str):
        return str(place.path.parent / Path(value).expanduser())
    if kind is list:
        rows = value if isinstance(value, list) else [value]
        return [str(row) for row in rows]
    if isinstance(value, list) and kind is str and all(isinstance(v, str) for v in value):
        return ",".join(value)
    if kind is float and isinstance(value, str):
        return value  # "6h"
    wanted: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise UserError(
            f"{place}: {name.replace('_', '-')} = {value!r}", hint=f"{_KINDS[kind]} is expected"
        )
    return str(value) if kind is float else value


# -- the environment


def _take_environment(settings: Settings, commands: Commands, environ: Mapping[str, str]) -> None:
    names = {name for command in commands.values() for name in options_of(command)}
    names -= {"inputs", "source"}
    for variable, value in sorted(environ.items()):
        if not variable.startswith(PREFIX):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name in OTHER_VARIABLES:
            continue
        if name not in names:
            known = [*names, *OTHER_VARIABLES]
            near = get_close_matches(name, known, n=1, cutoff=NEAR)
            if near:  # anything else may belong to another program
                hint = f"did you mean {PREFIX}{near[0].upper()}?"
                raise UserError(f"no setting {variable}", hint=hint)
            continue
        for command, function in commands.items():
            if name in options_of(function):
                kind = _kind(options_of(function)[name].annotation)
                fitted = [v for v in value.splitlines() if v] if kind is list else value
                settings.by_command[command][name] = Setting(fitted, variable)


# -- to show


def told(settings: Settings, commands: Commands, command: str) -> Iterator[str]:
    """A command's effective settings, a line each, and where they come from."""
    for name, parameter in options_of(commands[command]).items():
        if name in NOT_IN_FILES:
            continue
        found = settings.by_command[command].get(name)
        value = found.value if found else parameter.default
        shown = "(set)" if name in SECRETS and value else _shown(value)
        origin = found.origin if found else "default"
        yield f"{name.replace('_', '-')} = {shown}  # {origin}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return '""'
    return str(value) if isinstance(value, int | float) else f'"{value}"'
