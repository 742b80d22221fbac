"""LeRobotAct: LeRobot's ACT policy as it acts: with the latent z = 0 (Zhao et al., 2023).

A transformer over [z, state, environment state, pixels of feature maps], whose decoder has one
learned query per step, predicts the chunk. It is deterministic: there is no noise to steer. The
encoder of the latent, which only LeRobot's training uses, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.affine import Affine
from embodied.core.bounds import Chunk, Count, Few, Units
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.nn.networks import per_row
from embodied.policies.lerobot.policy import Input, LeRobotPolicy
from embodied.policies.networks.blocks import FrozenBatchNorm, channels_of, resnet


@dataclass(frozen=True)
class TransformerConfig:
    """Settings of LeRobot's Transformer, which has its tensor names (Zhao et al., 2023).

    It differs from that of `embodied.policies.generative.act`: tokens of feature-map pixels,
    positions that are added to queries and keys of every layer, and normalisation after each part
    (or before it).
    """

    width: Units = 512  # units of a token
    heads: Few = 8  # attention heads of a layer
    feedforward: Count = 3200  # units of the hidden layer
    activation: Literal["relu", "gelu"] = "relu"  # of the hidden layer
    encoder: Count = 4  # layers of the encoder
    decoder: Count = 1  # layers of the decoder
    before: bool = False  # normalise before a part, not after it


class Encoder(nn.Module):
    """Self-attention over tokens [T, n, width] with positions [T, 1, width]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder))
        self.norm = nn.LayerNorm(config.width) if config.before else nn.Identity()

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, places)
        return self.norm(x)


class Part(nn.Module):
    """Base class of both kinds of layers: the residual parts and their normalisation."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.width
        self.self_attn = nn.MultiheadAttention(width, config.heads)
        self.linear1 = nn.Linear(width, config.feedforward)
        self.linear2 = nn.Linear(config.feedforward, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.before = config.before
        self.activation = functional.relu if config.activation == "relu" else functional.gelu

    def _attend_to_itself(self, x: Tensor, places: Tensor) -> Tensor:
        h = self.norm1(x) if self.before else x
        at = h + places
        x = x + attention(self.self_attn, at, at, h)
        return x if self.before else self.norm1(x)

    def _feed(self, x: Tensor, norm: nn.Module) -> Tensor:
        h = norm(x) if self.before else x
        x = x + self.linear2(self.activation(self.linear1(h)))
        return x if self.before else norm(x)


class EncoderLayer(Part):
    """Self-attention and a feed-forward part."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self._feed(self._attend_to_itself(x, places), self.norm2)


class Decoder(nn.Module):
    """Attention of queries [H, n, width] to themselves and to encoded tokens [T, n, width]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, seen: Tensor, places: Tensor, seen_places: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, seen, places, seen_places)
        return self.norm(x)


class DecoderLayer(Part):
    """Self-attention, attention to the encoder's tokens, and a feed-forward part."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.multihead_attn = nn.MultiheadAttention(config.width, config.heads)
        self.norm3 = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, seen: Tensor, places: Tensor, seen_places: Tensor) -> Tensor:
        x = self._attend_to_itself(x, places)
        h = self.norm2(x) if self.before else x
        x = x + attention(self.multihead_attn, h + places, seen + seen_places, seen)
        x = x if self.before else self.norm2(x)
        return self._feed(x, self.norm3)


class Places2d(nn.Module):
    """Sines and cosines [1, width, H, W] of the places in a feature map [n, C, H, W]."""

    def __init__(self, half: int) -> None:
        super().__init__()
        self.size = half

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        index = torch.arange(self.size, dtype=torch.float32, device=x.device)
        frequency = 10000 ** (2 * (index // 2) / self.size)
        rows = self._waves(height, frequency)[:, None].expand(-1, width, -1)
        columns = self._waves(width, frequency)[None].expand(height, -1, -1)
        return torch.cat([rows, columns], 2).permute(2, 0, 1)[None]

    def _waves(self, count: int, frequency: Tensor) -> Tensor:
        """Interleaved sines and cosines [count, half] of 2 pi i / count, i = 1 .. count."""
        place = torch.arange(1, count + 1, dtype=torch.float32, device=frequency.device)
        place = place / (count + 1e-6) * (2 * math.pi)
        angle = place[:, None] / frequency
        return torch.stack([angle[:, 0::2].sin(), angle[:, 1::2].cos()], -1).flatten(1)


def attention(layer: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The output [T, n, width] of a multi-head attention."""
    return cast(Tensor, layer(query, key, value, need_weights=False)[0])


@dataclass(frozen=True)
class Config:
    """Settings of LeRobot's ACT; `inputs` and `action` as in `embodied.policies.lerobot.policy`."""

    inputs: Mapping[str, Input]  # the features that the policy takes, by LeRobot's name
    chunk: Chunk  # actions of one decision, of the `horizon` predicted ones
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
            self.encoder_img_feat_input_proj = nn.Conv2d(channels_of(config.backbone), width, 1)
            self.encoder_cam_feat_pos_embed = Places2d(width // 2)
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + vectors, width)
        self.decoder_pos_embed = nn.Embedding(config.horizon, width)
        self.action_head = nn.Linear(width, action)

    def tokens(self, given: list[tuple[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """Tokens [T, n, width] and their places [T, 1, width], of normalised inputs."""
        some = given[0][1]
        z = some.new_zeros(some.shape[0], self.config.latent)  # `len` would be a number in a graph
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
        return self.action_head(self.decoder(start, seen, queries, places).transpose(0, 1))
