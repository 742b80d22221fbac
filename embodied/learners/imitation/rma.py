"""RMA: the code of a trained teacher's privileged state, read from the past (Kumar et al., 2021).

The second of two stages. The teacher acts on the present o and a code z(e) of the privileged state
(`PrivilegedEncoder`); the student keeps its head and learns the code from the past h,

    L = mean |mu(h) - z(e)|^2,

on the states that it visits itself. HIB (`learner=hib`) learns both in one stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from embodied.core.bounds import Count, Fraction, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.checkpoint import load_policy
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.learner import Learner
from embodied.nn.optim import Adam
from embodied.policies.networks.history import PastEncoder, PrivilegedEncoder, encoder_of


@dataclass(frozen=True)
class Config:
    """Settings of the second stage."""

    teacher: str = ""  # run folder of the first stage
    batch_size: Count = 256  # observations per update
    lr: PositiveFraction = 1e-3  # Adam's learning rate
    gamma: Fraction = 0.99  # discount of the logged rewards; nothing is learned from them


class Rma(Learner):
    """Trained from a replay buffer of the student's own steps."""

    data = "off_policy"
    usual_policy = "deterministic"

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        super().__init__(config, policy)
        if not config.teacher:
            raise ConfigError("learner.teacher names a trained run: learner.teacher=RUN")
        teacher = load_policy(config.teacher, spec)
        student = encoder_of(policy)
        self.taught = encoder_of(teacher)
        if type(student) is not PastEncoder or not isinstance(self.taught, PrivilegedEncoder):
            raise ConfigError(
                "learner=rma: policy.extractor is PastEncoder here and PrivilegedEncoder in the "
                "run of the teacher (embodied.policies.networks.history)"
            )
        self.taught.requires_grad_(False)
        own = ("encoder.coder.", "encoder.known.")
        state = {k: v for k, v in teacher.state_dict().items() if not k.startswith(own)}
        policy.load_state_dict(state, strict=False)
        policy.requires_grad_(False)
        weights = student.coder.requires_grad_(True).parameters()
        self.optims["adam"] = Adam(weights, config.lr)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        obs = under(batch, "obs")
        loss = (encoder_of(self.policy).coded(obs) - self.taught.coded(obs)).square().mean()
        self.descend("adam", loss)
        return {"code_loss": loss.detach()}

    def fit(self, transitions: Tensors) -> None:
        """The teacher's normaliser is kept."""
