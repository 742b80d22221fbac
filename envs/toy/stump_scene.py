"""MuJoCo model of the stump-track walker: a hull on two legs of two links, in a plane.

Sizes, masses, joint limits and motors are those of BipedalWalker (Gymnasium's Box2D environment).
Its motors hold a speed with a maximum torque; here torque falls with speed as in a DC motor,

    torque = 80 a - (80 / w) speed    (N m, w = 4 rad/s at the hips, 6 at the knees)
"""

from __future__ import annotations

import mujoco

STEP = 14 / 30
"""One terrain step, m: heights, widths and spacings of stumps count in these."""
SLOTS = 24
"""Stumps that are there at once: those around the walker, and those that it is about to see."""
TALLEST = 10.0
"""In terrain steps; a stump is a box of this height, sunk into the ground but for its own."""
HULL = (32 / 30, 0.35, 8.5 / 30)
THIGH = 4 / 30
SHIN = 3.2 / 30
LEG = 34 / 30
HIP = -8 / 30
STAND = 2 * LEG + 0.15
"""Height of the hull's middle above the ground at a start, m."""
TORQUE = 80.0
SPEEDS = (4.0, 6.0)
JOINTS = ("hip_1", "knee_1", "hip_2", "knee_2")
CONTACTS = ("hull", "shin_1", "shin_2")


def compile_walker() -> mujoco.MjModel:
    """Walker, ground and SLOTS stumps (mocap bodies: where they are is part of the state)."""
    return mujoco.MjModel.from_xml_string(_xml())


def _xml() -> str:
    legs = "".join(_leg(i, y) for i, y in ((1, -0.2), (2, 0.2)))
    motors = "".join(f'<motor joint="{name}" gear="{TORQUE}"/>' for name in JOINTS)
    touches = "".join(f'<touch name="{name}" site="{name}"/>' for name in CONTACTS)
    return f"""
<mujoco model="stump_track">
  <compiler angle="radian"/>
  <option timestep="0.005" gravity="0 0 -10" iterations="20" ls_iterations="10"/>
  <statistic extent="8" center="0 0 1"/>
  <visual><global offwidth="1280" offheight="960"/><headlight ambient="0.5 0.5 0.5"/></visual>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1=".85 .92 1" rgb2="1 1 1"
      width="64" height="64"/>
    <texture name="grass" type="2d" builtin="checker" rgb1=".47 .66 .37" rgb2=".42 .61 .33"
      width="128" height="128"/>
    <material name="grass" texture="grass" texrepeat="0.5 0.5" texuniform="true"/>
  </asset>
  <default>
    <geom contype="0" conaffinity="1" friction="0.7 0.005 0.0001"/>
    <joint axis="0 -1 0" limited="true" armature="0.02"/>
    <motor ctrlrange="-1 1" ctrllimited="true"/>
    <site group="4" rgba="0 0 0 0"/>
  </default>
  <worldbody>
    <light directional="true" castshadow="false" pos="0 0 20" dir="0.3 0.5 -1"/>
    <geom name="ground" type="plane" size="0 0 1" contype="1" conaffinity="0" material="grass"/>
    {"".join(_stump(slot) for slot in range(SLOTS))}
    <body name="hull" pos="0 0 {STAND}">
      <camera name="side" mode="track" pos="1.5 -8.5 0.2" xyaxes="1 0 0 0 0.08 1"/>
      <joint name="x" type="slide" axis="1 0 0" limited="false" armature="0"/>
      <joint name="z" type="slide" axis="0 0 1" limited="false" armature="0"/>
      <joint name="pitch" type="hinge" limited="false" armature="0"/>
      <geom name="hull" type="box" group="1" size="{HULL[0]} {HULL[1]} {HULL[2]}" mass="5.1"
        rgba=".50 .38 .66 1"/>
      <site name="hull" type="box" size="{HULL[0] + 0.05} {HULL[1] + 0.05} {HULL[2] + 0.05}"/>
      {legs}
    </body>
  </worldbody>
  <actuator>{motors}</actuator>
  <sensor>{touches}</sensor>
</mujoco>"""


def _stump(slot: int) -> str:
    half = TALLEST * STEP / 2
    return f"""
    <body name="stump_{slot}" mocap="true" pos="{1000 + 2 * slot} 0 0">
      <geom type="box" size="{STEP / 2} 1 {half}" contype="1" conaffinity="0" rgba=".45 .36 .28 1"/>
    </body>"""


def _leg(number: int, y: float) -> str:
    shade = ".60 .47 .76 1" if number == 1 else ".40 .30 .54 1"
    hip, knee = (TORQUE / speed for speed in SPEEDS)
    return f"""
      <body name="thigh_{number}" pos="0 {y} {HIP}">
        <joint name="hip_{number}" range="-0.8 1.1" damping="{hip}"/>
        <geom type="capsule" group="1" fromto="0 0 0 0 0 {-LEG}" size="{THIGH}" mass="0.30"
          rgba="{shade}"/>
        <body name="shin_{number}" pos="0 0 {-LEG}">
          <joint name="knee_{number}" range="-1.6 -0.1" damping="{knee}"/>
          <geom type="capsule" group="1" fromto="0 0 0 0 0 {-LEG + SHIN}" size="{SHIN}" mass="0.24"
            rgba="{shade}"/>
          <site name="shin_{number}" type="capsule" fromto="0 0 0 0 0 {-LEG + SHIN}"
            size="{SHIN + 0.05}"/>
        </body>
      </body>"""
