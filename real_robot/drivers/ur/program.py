"""Settings of a UR's driver, and the program that runs on its controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from embodied.core.bounds import Bound
from embodied.core.build import ConfigError
from embodied.real_robot.drivers.driver import Wait

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")


@dataclass(frozen=True)
class Config:
    """Settings of a UR. After `watchdog` s without a command the program on the arm stops it."""

    host: str  # address of the arm
    frequency: Annotated[float, Bound(1.0, 1000.0)] = 500.0  # Hz: 500 of an e-Series, 125 of a CB3
    lookahead: Annotated[float, Bound(0.03, 0.2)] = 0.1  # servoj's, s
    gain: Annotated[float, Bound(100.0, 2000.0)] = 300.0  # servoj's
    watchdog: Annotated[float, Bound(above=0.0, high=10.0)] = 0.1  # s; two periods or more
    brake: Annotated[float, Bound(above=0.0, high=100.0)] = 4.0  # to stop, rad/s^2; UrRtde: m/s^2
    silence: Wait = 0.1  # s without news after which the arm is lost
    patience: Wait = 10.0  # s for what is asked before anything moves
    joints: tuple[str, ...] = JOINTS  # names of the six joints

    def __post_init__(self) -> None:
        if not (0.03 <= self.lookahead <= 0.2 and 100 <= self.gain <= 2000):
            raise ConfigError("servoj: lookahead is 0.03 to 0.2 s, gain 100 to 2000")
        if not (self.frequency > 0 and self.watchdog * self.frequency >= 2 and self.brake > 0):
            raise ConfigError("frequency and brake should be above 0, watchdog two ticks or more")
        if len(self.joints) != 6:
            raise ConfigError(f"a UR has 6 joints, {len(self.joints)} are named")


def program(config: Config) -> str:
    """The program that runs on the arm. Registers 24 to 29 are the target, integer 24 the beat
    (0: nothing has been said yet, below 0: leave), integer 25 is 1 for freedrive. What an
    earlier session left in them is not followed: only a beat that changes is."""
    dt, most = 1 / config.frequency, round(config.watchdog * config.frequency)
    registers = ", ".join(f"read_input_float_register({i})" for i in range(24, 30))
    return f"""def follow():
  beat = read_input_integer_register(24)
  still = 0
  begun = False
  free = False
  going = True
  while going:
    said = read_input_integer_register(24)
    if said == beat:
      still = still + 1
    else:
      still = 0
      beat = said
      begun = begun or beat > 0
    end
    if begun and (beat < 0 or still > {most}):
      going = False
    elif begun and read_input_integer_register(25) == 1:
      if not free:
        stopj({config.brake:g})
        freedrive_mode()
        free = True
      end
      sync()
    elif begun and free:
      end_freedrive_mode()
      free = False
    elif begun:
      servoj([{registers}], t={dt:g}, lookahead_time={config.lookahead:g}, gain={config.gain:g})
    else:
      sync()
    end
  end
  if free:
    end_freedrive_mode()
  end
  stopj({config.brake:g})
end
"""
