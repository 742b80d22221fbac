"""Crazyflie app export: a rotor-speed policy as an out-of-tree controller of the firmware.

It writes the policy's C header; a header that computes the policy's observation from the drone's
state estimate (position relative to the set-point, rotation, velocity, angular velocity, past
actions) and rotor thrusts from its actions; and the controller, which uses the firmware's PID until
`policy.enable` is set, and falls back to it if the drone leaves the permitted region or the state
estimate is not finite. Thrusts are
passed as force and torque with the firmware's own constants, which its mixer inverts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embodied.core import checkpoint
from embodied.core.build import ConfigError, nearest, registered
from embodied.core.saved_node import read_run_settings
from embodied.embodiments.crazyflie import BOX, MOTORS, RATE, VEHICLES, Vehicle
from embodied.export.c_header import number, write_header
from embodied.export.decision import Decision, Export, facts

SEEN = (
    *("x", "y", "z"),
    *(f"R_{row}{column}" for row in "xyz" for column in "xyz"),
    *("v_x", "v_y", "v_z"),
    *("omega_x", "omega_y", "omega_z"),
)
"""What the policy sees before its past actions (oldest first), by name."""


def write_crazyflie(
    decision: Decision, about: dict[str, Any], vehicle: Vehicle, folder: Path
) -> Export:
    """Write the app; `vehicle`: of the training simulation. ConfigError if no rotor speeds."""
    past = history(decision)
    source = folder / "src"
    source.mkdir(parents=True, exist_ok=True)
    made = write_header(decision, about, source / "policy.h")
    (source / "policy_flight.h").write_text(flight(past, vehicle))
    code = template("policy_controller.c").replace("@HASH@", f"0x{digits(about):08x}u")
    (source / "policy_controller.c").write_text(code)
    for name, text in PLAIN.items():
        (folder / name).write_text(text)
    return made


@registered("onboard export")
def export_app(run: Path, folder: Path) -> dict[str, Any]:
    """Write the app of the policy of `run` to `folder`; returns metadata for the driver."""
    decision = Decision(checkpoint.load_policy(run))
    about = facts(decision, run)
    write_crazyflie(decision, about, trained_on(run), folder)
    return {"onboard": f"{digits(about):08x}"}


def trained_on(run: Path) -> Vehicle:
    """The vehicle of a run's environment; for a checkpoint without run, the default vehicle."""
    file = checkpoint.find(run).parent.parent / "run.yaml"
    name = read_run_settings(file)["env"].get("vehicle", "paper") if file.exists() else "paper"
    if name not in VEHICLES:
        raise ConfigError(f"{file} names no vehicle of ours ({name}){nearest(str(name), VEHICLES)}")
    return VEHICLES[name]


def history(decision: Decision) -> int:
    """Past actions in the policy's observation; ConfigError if its actions are no rotor speeds."""
    spec = decision.policy.spec
    names = spec.obs["state"].names if list(decision.leaves) == ["state"] else ()
    past = (len(names) - len(SEEN)) // len(MOTORS)
    wanted = [*SEEN, *(f"{m}_{age}" for age in range(past, 0, -1) for m in MOTORS)]
    if spec.act.names != MOTORS or list(names) != wanted or spec.dt != 1 / RATE:
        raise ConfigError(
            "the Crazyflie app needs a rotor-speed policy (experiment=quadrotor_hover); this one's "
            f"actions are {', '.join(spec.act.names) or 'unnamed'}: deploy it by radio"
        )
    return past


def digits(about: dict[str, Any]) -> int:
    """The first 32 bits of the policy's hash, by which the drone reports its policy."""
    return int(str(about.get("policy_sha256", "0"))[:8], 16)


def flight(past: int, vehicle: Vehicle) -> str:
    """The text of policy_flight.h."""
    c0, c1, c2 = (number(each) for each in vehicle.thrust)
    numbers = {
        "HISTORY": str(past),
        "HOVER": number(vehicle.hover),
        "C0": c0,
        "C1": c1,
        "C2": c2,
        "REACH": number(BOX),
    }
    defines = "\n".join(f"#define POLICY_{name} {value}" for name, value in numbers.items())
    return template("policy_flight.h").replace("@DEFINES@", defines)


def template(name: str) -> str:
    """The C source of that name beside this module, with marks that are to be replaced."""
    return Path(__file__).with_name(name).read_text()


PLAIN = {
    "Makefile": """\
# make CRAZYFLIE_BASE=path/to/crazyflie-firmware
CRAZYFLIE_BASE ?= ../crazyflie-firmware
OOT_CONFIG := $(PWD)/app-config

include $(CRAZYFLIE_BASE)/tools/make/oot.mk
""",
    "Kbuild": "obj-y += src/\n",
    "src/Kbuild": "obj-y += policy_controller.o\n",
    "app-config": """\
CONFIG_APP_ENABLE=y
CONFIG_APP_PRIORITY=1
CONFIG_APP_STACKSIZE=350
CONFIG_CONTROLLER_OOT=y
""",
}
