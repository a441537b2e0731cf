"""Durations that run away: one more try, then a failure of that sentence alone."""

from types import SimpleNamespace

import pytest
import torch

from omnicli import models
from omnicli.data import Failure, Request, Speech
from omnicli.execution.families.cascade.speak import Talk, utterances, voice_info
from omnicli.execution.nets.vits import load_talker

TEXTS = ("Thank you.", "Please bring a card.", "Nobody has the keys.", "Good bye.")
GUILTY = 2


@pytest.fixture(scope="module")
def voice(model_cache):
    return voice_info(models.find("voice", None, model_cache).folder)


@pytest.fixture(scope="module")
def net(voice):
    return load_talker(voice.folder, voice.config, "cpu")


@pytest.fixture(scope="module")
def said(voice):
    return [
        u
        for text in TEXTS
        for u in utterances(voice, Request(request_id=text), text, seed=1, speaking_rate=1.0)
    ]


class Durations:
    """The voice's own, but for one row: `times` times its phonemes last for `log_frames`.

    A row is known by its count of phonemes.
    """

    def __init__(self, inner, size, times, log_frames):
        self.inner, self.size, self.left, self.log_frames = inner, size, times, log_frames

    def __call__(self, hidden, mask, noise, speakers):
        made = self.inner(hidden, mask, noise, speakers)
        guilty = mask.sum(dim=(1, 2)) == self.size
        if bool(guilty.any()) and self.left > 0:
            self.left -= 1
            made[guilty] = self.log_frames
        return made


def talk(net, voice, said, times, log_frames=9.0):
    durations = Durations(net.dp, len(said[GUILTY].ids), times, log_frames)
    bent = SimpleNamespace(enc_p=net.enc_p, dp=durations, flow=net.flow, emb_g=net.emb_g)
    return Talk(bent, voice, "cpu")


def same(a, b):
    return torch.equal(a.latents, b.latents) and a.pause_s == b.pause_s


def test_one_row_alone_is_guilty(said):
    sizes = [len(u.ids) for u in said]
    assert len(said) == len(TEXTS)
    assert sizes.count(sizes[GUILTY]) == 1


def test_a_runaway_is_drawn_again_with_another_seed(net, voice, said):
    usual = talk(net, voice, said, 0).run(said)
    again = talk(net, voice, said, 1).run(said)
    assert isinstance(again[GUILTY], Speech)
    assert not same(again[GUILTY], usual[GUILTY]), "the same seed would run away again"
    assert all(same(a, b) for i, (a, b) in enumerate(zip(again, usual, strict=True)) if i != GUILTY)
    [alone] = talk(net, voice, said, 1).run([said[GUILTY]])
    assert same(alone, again[GUILTY])


def test_what_runs_away_twice_fails_alone(net, voice, said):
    usual = talk(net, voice, said, 0).run(said)
    made = talk(net, voice, said, 2).run(said)
    assert isinstance(made[GUILTY], Failure)
    assert (made[GUILTY].code, made[GUILTY].stage) == ("runaway", "talk")
    assert all(same(a, b) for i, (a, b) in enumerate(zip(made, usual, strict=True)) if i != GUILTY)


def test_durations_that_are_no_numbers_are_not_drawn_again(net, voice, said):
    stage = talk(net, voice, said, 9, float("nan"))
    made = stage.run(said)
    assert made[GUILTY].code == "not_finite"
    assert stage._net.dp.left == 8
    assert all(isinstance(m, Speech) for i, m in enumerate(made) if i != GUILTY)
