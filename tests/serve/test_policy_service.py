"""What a served policy answers, and what it refuses in one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.serve.policy_service import PolicyService
from embodied.serve.protocol import Offer, RequestError

ACT = Leaf((2,), low=-1.0, high=1.0)
SPEC = Spec({"state": Leaf((3,)), "critic/mass": Leaf((1,))}, ACT, dt=0.1, text="go")
FLOW = {"_target_": "embodied.policies.generative.flow.Flow", "chunk": 4, "width": 16}
GRU = {
    "_target_": "embodied.policies.recurrent.Recurrent",
    "inner": {"_target_": "embodied.policies.diagonal_gaussian.DiagonalGaussian", "hidden": [8]},
}
GAUSSIAN = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [8]}


def service(node: dict[str, Any] = FLOW, spec: Spec = SPEC) -> PolicyService:
    torch.manual_seed(0)
    return PolicyService(build(node, Policy, spec=spec))


def state(*shape: int) -> np.ndarray[Any, Any]:
    return np.linspace(-1, 1, 3 * max(1, int(np.prod(shape)))).reshape(*shape, 3)


def test_metadata_say_what_is_served() -> None:
    offer = service().offer
    assert offer == Offer.from_metadata(service().metadata)
    assert (offer.chunk, offer.noise, offer.normal, offer.features) == (4, (8,), True, 3)
    assert offer.batch and offer.spec == SPEC.to_json() and offer.software.startswith("embodied-rl")
    other = service(FLOW | {"width": 8}).offer
    assert offer.policy != other.policy and offer.normalizer == other.normalizer
    assert Offer.from_metadata({"stock": 1}) == Offer()


def test_the_hash_of_the_normalizer_follows_its_numbers() -> None:
    policy = build(FLOW, Policy, spec=SPEC)
    before = PolicyService(policy).offer
    obs = {"obs/state": torch.randn(50, 3), "action": torch.rand(50, 4, 2)}
    policy.fit({**obs, "valid": torch.ones(50, 4, dtype=torch.bool)})
    after = PolicyService(policy).offer
    assert before.normalizer != after.normalizer and before.policy != after.policy


def test_one_observation_and_a_batch_of_them() -> None:
    served, noise = service(), np.ones((5, 8))
    many = served.infer({"state": state(5), "noise": noise, "embodied": {"batch": 5}})
    assert many["actions"].shape == (5, 4, 2) and many["carry"] == {}
    one = served.infer({"state": state(5)[2], "noise": noise[2]})
    assert set(one) == {"actions"} and one["actions"].shape == (4, 2)
    np.testing.assert_allclose(one["actions"], many["actions"][2], atol=1e-6)


def test_a_policy_with_noise_for_exploration_only() -> None:
    offer = service(GAUSSIAN).offer
    assert offer.noise == (2,) and not offer.normal


def test_a_policy_that_remembers_is_served_with_its_carry() -> None:
    served = service(GRU)
    assert served.remembers
    with pytest.raises(RequestError, match="carries values between decisions"):
        served.infer({"state": state()})
    first = served.infer({"state": state(), "embodied": {}})
    again = served.infer({"state": state(), "embodied": {"carry": first["carry"]}})
    assert not np.array_equal(first["carry"]["h"], again["carry"]["h"])


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        ({}, "state is missing"),
        ({"state": state(), "stat": 1}, 'no observation stat .did you mean "state"'),
        ({"state": state(2)}, r"state is float64\[2, 3\], and should have the shape \[3\]"),
        ({"state": "abc"}, "state is"),
        ({"state": [[1], [2, 3]]}, "state is no array"),
        ({"state": np.array([1, np.inf, 2])}, "not finite"),
        ({"state": np.array([1j, 0, 0])}, "state is complex"),
        ({"state": state(), "noise": np.ones(7)}, r"noise is float64\[7\]"),
        ({"state": state(), "noise": np.full(8, np.nan)}, "not finite"),
        ({"state": state(), "embodied": {"batch": 0}}, "batch=0"),
        ({"state": state(), "embodied": {"batch": 2.5}}, "batch=2.5"),
        ({"state": state(), "embodied": {"batch": 10**6}}, "batch=1000000"),
        ({"state": state(), "embodied": {"verb": "train"}}, "no 'train'|no train"),
        ({"state": state(), "embodied": {"bach": 2}}, "batch, verb, carry"),
        ({"state": state(), "embodied": 3}, "is a map"),
        ({"state": state(), "embodied": {"carry": {"h": 1}}}, "carry is a map of nothing"),
        ({"state": state(), "prompt": "jump"}, "does one task, 'go'"),
    ],
)
def test_what_cannot_be_answered_is_one_line(request_: dict[str, Any], line: str) -> None:
    with pytest.raises(RequestError, match=line) as caught:
        service().infer(request_)
    assert "\n" not in str(caught.value)


def test_pictures_are_not_rounded_silently() -> None:
    spec = Spec({"front": Leaf((8, 8, 3), "uint8")}, ACT, dt=0.1)
    gaussian = service(GAUSSIAN, spec)
    picture = np.full((8, 8, 3), 7)
    assert gaussian.infer({"front": picture})["actions"].shape == (1, 2)
    for wrong in (picture / 255, picture + 300, picture - 300):
        with pytest.raises(RequestError, match="should be uint8"):
            gaussian.infer({"front": wrong})


def test_names_that_the_protocol_needs_are_refused() -> None:
    with pytest.raises(ConfigError, match="an observation called noise cannot be served"):
        service(GAUSSIAN, Spec({"noise": Leaf((2,))}, ACT, dt=0.1))
