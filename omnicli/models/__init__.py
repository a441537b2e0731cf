"""Models by name, path or hub id: found, fetched, checked, converted once, kept in a cache."""

from omnicli.models.catalogue import DEFAULTS, EMBEDDED, ENTRIES, Kind
from omnicli.models.choose import choose
from omnicli.models.folders import cache_dir
from omnicli.models.manage import Added, Problem, Row, add, listing, path, pull, verify
from omnicli.models.store import Model, find

__all__ = [
    "DEFAULTS",
    "EMBEDDED",
    "ENTRIES",
    "Added",
    "Kind",
    "Model",
    "Problem",
    "Row",
    "add",
    "cache_dir",
    "choose",
    "find",
    "listing",
    "path",
    "pull",
    "verify",
]
