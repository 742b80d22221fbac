"""DsrlFeatures: DSRL on the features of the frozen base's encoder instead of images.

The inner policy and its critics get the features of the base's encoder instead of the observations,
so no images are stored or encoded in updates (as DSRL does on large policies; Wagenmaker et al.,
2025). Critic-only observations are unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec, hidden
from embodied.core.tensors import Tensors, nest, under, with_history
from embodied.policies.steering.dsrl import Config, Dsrl


class DsrlFeatures(Dsrl):
    """The carry passes the observations from `observe` to `act`."""

    def inner_spec(self, config: Config, spec: Spec) -> Spec:
        size = self.base.feature_size
        if not size:
            raise ConfigError("the base policy has no encoder to share: use finetune=dsrl")
        kept = {name: leaf for name, leaf in spec.obs.items() if hidden(name)}
        return super().inner_spec(config, replace(spec, obs={"features": Leaf((size,)), **kept}))

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        kept = {name: value for name, value in obs.items() if hidden(name)}
        obs = with_history(obs, under(carry, "base"))
        return {"features": self.base.features(obs), **kept}, {**carry, **nest(obs, "sight")}

    def base_act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        return super().base_act(under(carry, "sight"), carry, noise)
