"""The firmware's app, compiled on this machine: it sees and does what the world does."""

from __future__ import annotations

import ctypes
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.checkpoint import save
from embodied.embodiments.crazyflie import LIBRARY, PAPER, Vehicle
from embodied.envs.quadrotor.hover_env import STATE, Config, Quadrotor
from embodied.export.c_header import FLAGS
from embodied.export.crazyflie import SEEN, history, trained_on, write_crazyflie
from embodied.export.decision import Decision, facts
from tests.builders import exit_of, make_policy

CC = shutil.which("cc")
needs_cc = pytest.mark.skipif(CC is None, reason="there is no C compiler (cc) on this machine")
Four = ctypes.c_float * 4
WRAP = """
#include "policy_flight.h"
static policy_flight_t f;
void begin(void); void look(const float *, float *);
void begin(void) { policy_flight_begin(&f); for (int i = 18; i < POLICY_INPUTS; i++) f.obs[i] = 0; }
bool step(const float *, const float *, const float *, const float *, float *, float *);
bool step(const float *p, const float *q, const float *v, const float *w, float *thrust, float *a)
{
    const bool done = policy_flight_step(&f, p, q, v, w, thrust);
    for (int i = 0; i < 4; i++) a[i] = f.action[i];
    return done;
}
"""
# Of the firmware's own headers, what the controller needs, and its mixer behind it.
FIRMWARE = {
    "FreeRTOS.h": "#define M2T(x) (x)\n",
    "task.h": "static inline void vTaskDelay(int t) { (void)t; }\n",
    "app.h": "void appMain(void);\n",
    "param.h": """#define PARAM_UINT8 0
#define PARAM_UINT32 1
#define PARAM_RONLY 2
#define PARAM_GROUP_START(n)
#define PARAM_GROUP_STOP(n)
#define PARAM_ADD(kind, name, at) void *param_##name(void); void *param_##name(void) { return at; }
""",
    "platform_defaults.h": "#define ARM_LENGTH 0.046f\n#define THRUST2TORQUE 0.005964552f\n",
    "stabilizer_types.h": """#include <stdint.h>
#include <stdbool.h>
typedef struct { float x, y, z; } point_t;
typedef struct { float x, y, z, w; } quaternion_t;
typedef enum { modeDisable = 0, modeAbs, modeVelocity } stab_mode_t;
typedef enum { controlModeLegacy, controlModeForceTorque, controlModeForce } control_mode_t;
typedef struct { float thrustSi, torqueX, torqueY, torqueZ; control_mode_t controlMode; } control_t;
typedef struct { point_t position; struct { stab_mode_t x, y, z; } mode; } setpoint_t;
typedef struct { point_t gyro; } sensorData_t;
typedef struct { point_t position, velocity; quaternion_t attitudeQuaternion; } state_t;
typedef uint32_t stabilizerStep_t;
#define RATE_100_HZ 100
#define RATE_DO_EXECUTE(hz, step) ((step) % (1000 / hz) == 0)
""",
    "controller.h": '#include "stabilizer_types.h"\nvoid controllerOutOfTreeInit(void);\n'
    "bool controllerOutOfTreeTest(void);\n"
    "void controllerOutOfTree(control_t *, const setpoint_t *, const sensorData_t *,\n"
    "                         const state_t *, const stabilizerStep_t);\n",
    "controller_pid.h": """#include "stabilizer_types.h"
static inline void controllerPidInit(void) {}
static inline bool controllerPidTest(void) { return true; }
static inline void controllerPid(control_t *c, const setpoint_t *s, const sensorData_t *g,
                                 const state_t *x, stabilizerStep_t t)
{ (void)s; (void)g; (void)x; (void)t; c->controlMode = controlModeLegacy; }
""",
    "main.c": """#include "policy_controller.c"
static float drift = 0.0f;
void blow(float speed);
void blow(float speed) { drift = speed; }
void tick(const float *, const float *, int, int, float *);
void tick(const float *place, const float *goal, int mode, int step, float *out)
{
    control_t c = {0}; setpoint_t s = {0}; sensorData_t g = {0}; state_t x = {0};
    s.position = (point_t){goal[0], goal[1], goal[2]};
    s.mode.x = s.mode.y = s.mode.z = mode;
    x.position = (point_t){place[0], place[1], place[2]};
    x.velocity.x = drift;
    x.attitudeQuaternion.w = 1.0f;
    controllerOutOfTree(&c, &s, &g, &x, step);
    const float arm = 0.707106781f * ARM_LENGTH, part = 0.25f * c.thrustSi;
    const float roll = 0.25f / arm * c.torqueX, pitch = 0.25f / arm * c.torqueY;
    const float yaw = 0.25f * c.torqueZ / THRUST2TORQUE;
    out[0] = part - roll - pitch - yaw;
    out[1] = part - roll + pitch + yaw;
    out[2] = part + roll + pitch - yaw;
    out[3] = part + roll - pitch + yaw;
    out[4] = (float)c.controlMode;
}
""",
}


def policy(past: int = 32, **settings: Any) -> tuple[Any, Quadrotor]:
    env = Quadrotor(Config(num_envs=1, history=past, noise=0.0, **settings))
    how: dict[str, Any] = {"hidden": [64, 64], "activation": "tanh"}
    made = make_policy("deterministic.Deterministic", env.spec, **how)
    with torch.no_grad():
        for each in made.net.parameters():
            each *= 1.5  # far from doing nothing
    return made.eval(), env


def app(folder: Path, made: Any, vehicle: Vehicle = PAPER) -> Path:
    decision = Decision(made)
    export = write_crazyflie(decision, facts(decision), vehicle, folder)
    assert export.difference is None or export.difference < 1e-5
    return folder / "src"


def compiled(folder: Path, main: str, level: str = "-O2", compiler: str = str(CC)) -> ctypes.CDLL:
    """`main`, compiled in `folder`, with the project's warnings on."""
    (folder / "main.c").write_text(main)
    made = folder / f"{Path(compiler).name}{level}.so"
    flags = [*(each for each in FLAGS if each != "-pedantic"), level]
    words = [compiler, *flags, "-Wno-missing-prototypes", "-fPIC", "-c", "main.c", "-o", "main.o"]
    # Linked without the level: -Ofast would turn subnormal numbers off in the whole test process.
    link = [compiler, "-shared", "main.o", "-lm", "-o", str(made)]
    for step in (words, link):
        done = subprocess.run(step, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(made))


def floats(values: Any) -> Any:
    listed = [float(each) for each in values]
    return (ctypes.c_float * len(listed))(*listed)


@needs_cc
@pytest.mark.parametrize(("past", "vehicle"), [(32, PAPER), (0, LIBRARY)])
def test_it_sees_and_does_what_the_world_does(tmp_path: Path, past: int, vehicle: Vehicle) -> None:
    """The C code is given the drone's state, and keeps the past actions by itself."""
    made, env = policy(past, vehicle="paper" if vehicle is PAPER else "library")
    assert SEEN == STATE and history(Decision(made)) == past
    it = compiled(app(tmp_path, made, vehicle), WRAP)
    obs, thrust, action = env.reset(3), Four(), Four()
    it.begin()
    longest = 0.0
    for _ in range(150):
        state = env.state[:, 0]
        it.step(
            floats(state[:3]), floats(state[3:7]), floats(state[7:10]), floats(state[10:13]),
            thrust, action,
        )  # fmt: skip
        with torch.no_grad():
            wanted = made.act(obs, {}, made.sample_noise(1))[0][0, 0]
        assert torch.tensor(list(action)) == pytest.approx(wanted, abs=1e-5)
        u = (wanted.clamp(-1, 1) + 1) / 2
        c0, c1, c2 = vehicle.thrust
        assert list(thrust) == pytest.approx((c0 + c1 * u + c2 * u * u).tolist(), abs=1e-6)
        step = env.step(wanted[None])
        obs = step.obs
        if step.ended.any():
            it.begin()
        longest = max(longest, float((wanted - vehicle.hover).abs().max()))
    assert longest > 0.2, "it did something"


@needs_cc
@pytest.mark.parametrize("level", ["-O0", "-O2", "-Ofast"])
def test_a_state_that_is_not_finite_is_refused(tmp_path: Path, level: str) -> None:
    """Nothing of it stays: afterwards it acts as if it had not been asked."""
    made, _ = policy(8)
    source = app(tmp_path, made)
    it, twin = compiled(source, WRAP, level), compiled(source, WRAP, "-O1")
    thrust, action, wanted = Four(), Four(), Four()
    it.step.restype = ctypes.c_bool
    sound = ([0.1, 0.0, -0.1], [1.0, 0, 0, 0], [0.0, 0.1, 0], [0.0, 0, 0.2])
    it.begin(), twin.begin()
    for broken in (math.nan, -math.nan, math.inf, -math.inf):
        for vector in range(4):
            for element in range(len(sound[vector])):
                given = [[*each] for each in sound]
                given[vector][element] = broken
                assert not it.step(*map(floats, given), thrust, action)
        assert it.step(*map(floats, sound), thrust, action)
        twin.step(*map(floats, sound), wanted, wanted)
        assert list(action) == pytest.approx(list(wanted), abs=1e-5)


@needs_cc
@pytest.mark.parametrize("level", ["-O2", "-Ofast"])
def test_the_firmwares_pid_flies_until_it_is_asked_for(tmp_path: Path, level: str) -> None:
    made, env = policy(32)
    source = app(tmp_path, made)
    for name, text in FIRMWARE.items():
        (source / name).write_text(f"#pragma once\n{text}")
    it = compiled(source, FIRMWARE["main.c"], level)
    it.controllerOutOfTreeInit()
    it.controllerOutOfTreeTest.restype = ctypes.c_bool
    assert it.controllerOutOfTreeTest(), "the self test of the policy's header"
    it.param_enable.restype = ctypes.POINTER(ctypes.c_uint8)
    enable, out = it.param_enable(), (ctypes.c_float * 5)()
    pid, learned, following, there = 0, 1, 1, floats([0.2, 0.1, 0.5])

    def tick(goal: list[float], step: int, mode: int = following) -> int:
        it.tick(there, floats(goal), mode, step, out)
        return int(out[4])

    assert tick([0, 0, 0.5], 0) == pid
    enable[0] = 1
    assert tick([0, 0, 0.5], 3) == learned, "at once, not only at the next hundredth"
    obs = env.reset(0)["state"].clone()
    obs[0, :18] = torch.tensor([0.2, 0.1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0])
    obs[0, 18:] = PAPER.hover
    with torch.no_grad():
        action = made.act({"state": obs}, {}, made.sample_noise(1))[0][0, 0].clamp(-1, 1)
    thrusts = (PAPER.thrust[2] * ((action + 1) / 2) ** 2).tolist()
    assert list(out)[:4] == pytest.approx(thrusts, abs=1e-6), "the mixer gives back each rotor's"
    assert tick([0, 0, 0.5], 4, mode=0) == pid, "levelling out is the firmware's"
    assert tick([0, 0, 0.5], 5) == pid and enable[0] == 0, "until somebody asks again"
    enable[0] = 1
    assert tick([0, 0, 1.2], 6) == pid, "0.7 m away is too far for it"
    it.blow.argtypes = [ctypes.c_float]
    for number in (math.nan, math.inf, -math.inf):
        enable[0] = 1
        assert tick([0, 0, 0.5], 10) == learned
        it.blow(number)
        assert tick([0, 0, 0.5], 12) == learned, "the state is looked at at the policy's rate"
        assert tick([0, 0, 0.5], 20) == pid and enable[0] == 0, "until somebody asks again"
        it.blow(0.0)
        assert tick([0, 0, 0.5], 30) == pid


def test_who_is_not_of_rotor_speeds_is_refused(tmp_path: Path) -> None:
    spec = Quadrotor(Config(num_envs=1, history=2)).spec
    other = type(spec)({"state": spec.obs["state"]}, spec.act, dt=0.05)
    made = make_policy("deterministic.Deterministic", other, hidden=[8])
    with pytest.raises(ConfigError, match="by radio"):
        write_crazyflie(Decision(made), {}, PAPER, tmp_path / "app")
    assert not (tmp_path / "app").exists()


def test_as_a_user_types_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, _ = policy(4)
    run = tmp_path / "run"
    save(run / "checkpoints" / "00000000", made, 0)
    (run / "run.yaml").write_text(json.dumps({"env": {"vehicle": "library"}, "execute": 1}))
    assert trained_on(run) == LIBRARY
    assert exit_of("export", run, "--to", tmp_path / "app", "--crazyflie") == 0
    assert "largest difference to PyTorch" in capsys.readouterr().out
    about = json.loads((run / "checkpoints" / "00000000" / "about.json").read_text())
    source = (tmp_path / "app" / "src" / "policy_controller.c").read_text()
    assert f"0x{about['policy_sha256'][:8]}u" in source
    names = {str(p.relative_to(tmp_path / "app")) for p in (tmp_path / "app").rglob("*")}
    assert {"Makefile", "Kbuild", "app-config", "src/Kbuild", "src/policy.h"} <= names
