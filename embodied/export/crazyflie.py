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
    """Write the app to `folder`; `vehicle`: parameters of the training simulation. ConfigError if
    the policy's actions are not rotor speeds."""
    past = history(decision)
    source = folder / "src"
    source.mkdir(parents=True, exist_ok=True)
    made = write_header(decision, about, source / "policy.h")
    (source / "policy_flight.h").write_text(flight(past, vehicle))
    (source / "policy_controller.c").write_text(controller(digits(about)))
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
    """Number of past actions in the policy's observation; ConfigError if its actions are not rotor
    speeds."""
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
    return FLIGHT.replace("@DEFINES@", defines)


def controller(hashed: int) -> str:
    """The text of policy_controller.c."""
    return CONTROLLER.replace("@HASH@", f"0x{hashed:08x}u")


FLIGHT = """\
/* What a policy of rotor speeds sees of a flight, and what its actions mean. */
#ifndef POLICY_FLIGHT_H
#define POLICY_FLIGHT_H
#include "policy.h"

@DEFINES@
/* C: thrust of a rotor in N, C0 + C1 u + C2 u^2 of the share u of its highest speed */

typedef struct {
    float obs[POLICY_INPUTS]; /* its end holds the past actions, oldest first */
    float action[POLICY_ACTIONS];
} policy_flight_t;

/* before the first step: as if it had hovered */
static inline void policy_flight_begin(policy_flight_t *f)
{
    for (int i = 18; i < POLICY_INPUTS; i++) f->obs[i] = POLICY_HOVER;
    for (int i = 0; i < POLICY_ACTIONS; i++) f->action[i] = POLICY_HOVER;
}

/* place: m, from the set-point to the drone; q: attitude, w x y z, body to world; velocity: m/s,
 * world; rates: rad/s, body; thrust: N, of the rotors front right, back right, back left, front
 * left. To be called every POLICY_DT seconds. False, and nothing else changed, where one of them is
 * not finite: something else has to fly. */
static inline bool policy_flight_step(policy_flight_t *f, const float place[3], const float q[4],
                                      const float velocity[3], const float rates[3],
                                      float thrust[4])
{
    const float w = q[0], x = q[1], y = q[2], z = q[3];
    const float rotation[9] = {
        1.0f - 2.0f * (y * y + z * z), 2.0f * (x * y - w * z), 2.0f * (x * z + w * y),
        2.0f * (x * y + w * z), 1.0f - 2.0f * (x * x + z * z), 2.0f * (y * z - w * x),
        2.0f * (x * z - w * y), 2.0f * (y * z + w * x), 1.0f - 2.0f * (x * x + y * y),
    };
    for (int i = 0; i < 3; i++) f->obs[i] = place[i];
    for (int i = 0; i < 9; i++) f->obs[3 + i] = rotation[i];
    for (int i = 0; i < 3; i++) f->obs[12 + i] = velocity[i];
    for (int i = 0; i < 3; i++) f->obs[15 + i] = rates[i];
    float action[POLICY_CHUNK * POLICY_ACTIONS];
    if (!policy_evaluate(f->obs, action)) return false;
    for (int i = 18; i < POLICY_INPUTS - POLICY_ACTIONS; i++)
        f->obs[i] = f->obs[i + POLICY_ACTIONS];
    for (int i = 0; i < POLICY_ACTIONS; i++) {
        const float a = fminf(fmaxf(action[i], -1.0f), 1.0f), u = 0.5f * (a + 1.0f);
        f->action[i] = a;
        if (POLICY_HISTORY > 0) f->obs[POLICY_INPUTS - POLICY_ACTIONS + i] = a;
        thrust[i] = POLICY_C0 + POLICY_C1 * u + POLICY_C2 * u * u;
    }
    return true;
}
#endif
"""
CONTROLLER = """\
/* An out-of-tree controller: the firmware's PID, and a policy while policy.enable is set. */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "FreeRTOS.h"
#include "task.h"
#include "app.h"
#include "controller.h"
#include "controller_pid.h"
#include "param.h"
#include "platform_defaults.h"
#include "stabilizer_types.h"

#define POLICY_SELF_TEST
#include "policy_flight.h"

#define RADIANS 0.0174532925f

static uint8_t enable = 0;
static uint32_t hash = @HASH@; /* of the policy: what is on board */
static bool flies = false;
static policy_flight_t flight; /* not on the stabilizer's stack */
static float thrust[4];

void appMain(void)
{
    while (true) vTaskDelay(M2T(1000));
}

void controllerOutOfTreeInit(void)
{
    controllerPidInit();
    flies = false;
}

bool controllerOutOfTreeTest(void)
{
    return controllerPidTest() && policy_self_test() < 1e-4f;
}

static bool wanted(const setpoint_t *setpoint, const state_t *state, float place[3])
{
    place[0] = state->position.x - setpoint->position.x;
    place[1] = state->position.y - setpoint->position.y;
    place[2] = state->position.z - setpoint->position.z;
    if (!policy_finite(place, 3)) return false;
    for (int i = 0; i < 3; i++)
        if (!(fabsf(place[i]) <= POLICY_REACH)) return false; /* too far */
    return enable && setpoint->mode.x == modeAbs && setpoint->mode.y == modeAbs &&
           setpoint->mode.z == modeAbs;
}

/* the policy's thrusts, at its rate; false where it is not given numbers, or gives none */
static bool decide(const float place[3], const sensorData_t *sensors, const state_t *state,
                   const stabilizerStep_t step)
{
    if (!flies) policy_flight_begin(&flight);
    if (flies && !RATE_DO_EXECUTE(RATE_100_HZ, step)) return true;
    const quaternion_t *q = &state->attitudeQuaternion;
    const float attitude[4] = {q->w, q->x, q->y, q->z};
    const float velocity[3] = {state->velocity.x, state->velocity.y, state->velocity.z};
    const float rates[3] = {sensors->gyro.x * RADIANS, sensors->gyro.y * RADIANS,
                            sensors->gyro.z * RADIANS};
    return policy_flight_step(&flight, place, attitude, velocity, rates, thrust);
}

void controllerOutOfTree(control_t *control, const setpoint_t *setpoint,
                         const sensorData_t *sensors, const state_t *state,
                         const stabilizerStep_t step)
{
    float place[3];
    if (!wanted(setpoint, state, place) || !decide(place, sensors, state, step)) {
        if (flies) controllerPidInit(); /* nothing of before is in its integrators */
        if (flies) enable = 0; /* until somebody asks for it again */
        flies = false;
        controllerPid(control, setpoint, sensors, state, step);
        return;
    }
    flies = true;
    /* the inverse of the firmware's mixer: M1 front right, M2 back right, M3 back left, M4 front
     * left */
    const float arm = 0.707106781f * ARM_LENGTH, turn = THRUST2TORQUE;
    control->controlMode = controlModeForceTorque;
    control->thrustSi = thrust[0] + thrust[1] + thrust[2] + thrust[3];
    control->torqueX = arm * (-thrust[0] - thrust[1] + thrust[2] + thrust[3]);
    control->torqueY = arm * (-thrust[0] + thrust[1] + thrust[2] - thrust[3]);
    control->torqueZ = turn * (-thrust[0] + thrust[1] - thrust[2] + thrust[3]);
}

PARAM_GROUP_START(policy)
PARAM_ADD(PARAM_UINT8, enable, &enable)
PARAM_ADD(PARAM_UINT32 | PARAM_RONLY, hash, &hash)
PARAM_GROUP_STOP(policy)
"""
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
