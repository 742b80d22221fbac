"""LeRobotAct: LeRobot's ACT policy as it acts: with the latent z = 0 (Zhao et al., 2023).

A transformer over [z, state, environment state, pixels of feature maps], whose decoder has one
learned query per step, predicts the chunk. It is deterministic: there is no noise to steer. The
encoder of the latent, which only LeRobot's training uses, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from embodied.core.affine import Affine
from embodied.core.bounds import Count
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.nn.networks import per_row
from embodied.policies.lerobot.policy import Input, LeRobotPolicy
from embodied.policies.lerobot.transformer import Decoder, Encoder, Places2d, TransformerConfig
from embodied.policies.networks.resnet import FrozenBatchNorm, channels_of, resnet


@dataclass(frozen=True)
class Config:
    """Settings of LeRobot's ACT; `inputs` and `action` as in `embodied.policies.lerobot.policy`."""

    inputs: Mapping[str, Input]  # the features that the policy takes, by LeRobot's name
    chunk: Count  # actions of one decision, of the `horizon` predicted ones
    horizon: Count  # steps of a prediction
    action: Affine | None = None  # physical values of -1 and +1 (null: the actions are in [-1, 1])
    latent: Count = 32  # size of z
    backbone: str = "resnet18"  # image encoder: resnet18, resnet34, ...
    dilate: bool = False  # dilation in the backbone's last layer
    transformer: TransformerConfig = field(default_factory=TransformerConfig)  # its layers

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= self.horizon:
            raise ConfigError(f"chunk={self.chunk} is not in 1..{self.horizon} (the prediction)")


class LeRobotAct(LeRobotPolicy):
    """Noise [n, 1] has no effect."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(spec, config.inputs, config.action, obs_steps=1)
        self.config = config
        self.chunk = config.chunk
        self.model = Network(config, spec.act.size)
        self.eval()

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.zeros(n, 1, device=self.middle.device)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        return self.units(self.predict(obs)[:, : self.chunk]), carry

    def predict(self, obs: Tensors) -> Tensor:
        """The network's actions [n, horizon, A]."""
        given = [(kind, values.squeeze(1)) for kind, values in self.prepared(obs)]
        return self.model(*self.model.tokens(given))

    @property
    def feature_size(self) -> int:
        return self.config.transformer.width

    def features(self, obs: Tensors) -> Tensor:
        """The mean of the encoder's tokens, [n, width]."""
        given = [(kind, values.squeeze(1)) for kind, values in self.prepared(obs)]
        return self.model.encoder(*self.model.tokens(given)).mean(0)

    def loss(self, batch: Tensors) -> Tensor:
        """Mean absolute error over the valid steps, [n], with z = 0."""
        predicted = self.predict(under(batch, "obs"))[:, : self.chunk]
        error = (predicted - self.range(batch["action"])).abs()
        return per_row(error, batch["valid"])


class Network(nn.Module):
    """ACT's network, with LeRobot's tensor names."""

    def __init__(self, config: Config, action: int) -> None:
        super().__init__()
        width = config.transformer.width
        inputs = list(config.inputs.values())
        self.config = config
        self.encoder = Encoder(config.transformer)
        self.decoder = Decoder(config.transformer)
        self.encoder_latent_input_proj = nn.Linear(config.latent, width)
        vectors = 0
        for each in inputs:
            if each.kind == "image":
                continue
            vectors += 1
            enter = nn.Linear(each.shape[0], width)
            if each.kind == "state":
                self.encoder_robot_state_input_proj = enter
            else:
                self.encoder_env_state_input_proj = enter
        if vectors < len(inputs):
            self.backbone = resnet(config.backbone, FrozenBatchNorm, config.dilate)
            channels = channels_of(config.backbone)
            self.encoder_img_feat_input_proj = nn.Conv2d(channels, width, 1)
            self.encoder_cam_feat_pos_embed = Places2d(width // 2)
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + vectors, width)
        self.decoder_pos_embed = nn.Embedding(config.horizon, width)
        self.action_head = nn.Linear(width, action)

    def tokens(self, given: list[tuple[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """Tokens [T, n, width] and their places [T, 1, width], of normalised inputs."""
        n = len(given[0][1])
        some = given[0][1]
        z = torch.zeros(n, self.config.latent, dtype=some.dtype, device=some.device)
        vectors = [self.encoder_latent_input_proj(z)]
        vectors += [self.encoder_robot_state_input_proj(x) for kind, x in given if kind == "state"]
        vectors += [self.encoder_env_state_input_proj(x) for kind, x in given if kind == "env"]
        tokens = [torch.stack(vectors)]
        places = [self.encoder_1d_feature_pos_embed.weight[:, None]]
        for kind, image in given:
            if kind == "image":
                seen = self.backbone(image)
                place = self.encoder_cam_feat_pos_embed(seen).to(seen.dtype)
                tokens.append(self.encoder_img_feat_input_proj(seen).flatten(2).permute(2, 0, 1))
                places.append(place.flatten(2).permute(2, 0, 1))
        return torch.cat(tokens), torch.cat(places)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """The chunk [n, horizon, A]."""
        seen = self.encoder(tokens, places)
        queries = self.decoder_pos_embed.weight[:, None]
        start = torch.zeros_like(queries).expand(-1, tokens.shape[1], -1)
        out = self.decoder(start, seen, queries, places)
        return self.action_head(out.transpose(0, 1))
