"""SO-101-style arm with five joints and a gripper: kinematics, limits, home pose and MJCF.

Joints: pan, lift, elbow, wrist, roll, gripper. Lengths and shapes are approximate (capsules, no
meshes) and close to the printed arm; measure your own arm before relying on centimetre accuracy. At
zero the upper arm points up, forearm and hand point forwards; lift, elbow and wrist rotate forwards
and down. All functions take a batch of B arms, as numpy arrays or torch tensors.
"""

from __future__ import annotations

import numpy as np

from embodied.core.build import registered
from embodied.embodiments.arrays import Floats, namespace

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll")
LOWER = np.array([-1.9, -1.7, -1.6, -1.6, -2.7])  # rad
UPPER = np.array([1.9, 1.7, 1.6, 1.6, 2.7])  # rad
HOME = np.array([0.0, -0.45, 0.62, 0.55, 0.0])  # rad
VELOCITY = 4.0
"""Of a servo without load, rad/s."""
OPEN = 0.07
"""Between the jaws when they are open, m."""
SHOULDER = (0.03, 0.11)
"""The lift axis: forwards of the pan axis, and above the table, m."""
UPPER_ARM = 0.116  # m
FOREARM = 0.135  # m
HAND = 0.155  # m, to the point between the jaws


@registered("kinematics")
def forward(q: Floats) -> tuple[Floats, Floats, Floats]:
    """Tool position [B, 3] (m), pitch [B] (rad, positive down) and Jacobian [B, 4, 5] of joint
    angles [B, 5]: three rows of linear velocity (base frame), one of the pitch's."""
    xp = namespace(q)
    pan = q[:, 0]
    lift = q[:, 1]
    fore = lift + q[:, 2]
    pitch = fore + q[:, 3]
    # In the arm's own upright plane: forwards and up, and how each joint below moves the tool.
    hand = (HAND * xp.cos(pitch), -HAND * xp.sin(pitch))
    arm = (FOREARM * xp.cos(fore) + hand[0], -FOREARM * xp.sin(fore) + hand[1])
    whole = (UPPER_ARM * xp.sin(lift) + arm[0], UPPER_ARM * xp.cos(lift) + arm[1])
    out = SHOULDER[0] + whole[0]
    up = SHOULDER[1] + whole[1]
    cos = xp.cos(pan)
    sin = xp.sin(pan)
    zero = xp.zeros_like(pan)
    place = xp.stack([cos * out, sin * out, up], 1)
    # A turn forwards and down by dq moves what is (forwards, up) away by (up, -forwards) dq.
    ways = [(part[1], -part[0]) for part in (whole, arm, hand)]
    columns = [xp.stack([-sin * out, cos * out, zero, zero], 1)]
    columns += [xp.stack([cos * r, sin * r, z, zero + 1.0], 1) for r, z in ways]
    columns += [xp.stack([zero, zero, zero, zero], 1)]
    return place, pitch, xp.stack(columns, 2)


def inverse(place: Floats, pitch: Floats) -> Floats:
    """Pan, lift, elbow and wrist [B, 4] (rad) that put the tool at `place` [B, 3] (m) with `pitch`
    [B] (rad, positive down), elbow up; what cannot be reached, or not within the limits, is
    approached.
    """
    xp = namespace(place)
    out = xp.hypot(place[:, 0], place[:, 1]) - HAND * xp.cos(pitch) - SHOULDER[0]
    up = place[:, 2] + HAND * xp.sin(pitch) - SHOULDER[1]
    # The bend between both rods, from 0 (stretched) to pi.
    square = out * out + up * up
    bend = (square - UPPER_ARM**2 - FOREARM**2) / (2 * UPPER_ARM * FOREARM)
    bend = xp.arccos(xp.clip(bend, -1.0, 1.0))
    ahead = xp.arctan2(FOREARM * xp.sin(bend), UPPER_ARM + FOREARM * xp.cos(bend))
    lift = xp.arctan2(out, up) - ahead
    elbow = bend - np.pi / 2
    joints = (xp.arctan2(place[:, 1], place[:, 0]), lift, elbow, pitch - lift - elbow)
    ends = zip(joints, LOWER, UPPER, strict=False)
    return xp.stack([xp.clip(q, float(low), float(high)) for q, low, high in ends], 1)


def mjcf() -> str:
    """The arm of rods, with position servos; site `tool`; the gripper slides (joint `gripper`)."""
    x, z = SHOULDER
    ranges = [f'range="{low:.3f} {high:.3f}"' for low, high in zip(LOWER, UPPER, strict=True)]
    servos = "\n".join(
        f'<position name="{name}" joint="{name}" kp="20" kv="0.6" forcerange="-3 3"/>'
        for name in JOINTS
    )
    rod = 'type="capsule" size="0.014" rgba="0.93 0.71 0.22 1"'
    jaw = 'type="box" size="0.02 0.004 0.012" rgba="0.2 0.2 0.22 1"'
    return f"""
<mujoco model="small arm">
  <compiler angle="radian"/>
  <option timestep="0.0025" integrator="implicitfast"/>
  <default><joint armature="0.01" damping="0.05"/><geom density="700" contype="0"/></default>
  <worldbody>
    <geom name="table" type="box" size="0.4 0.4 0.02" pos="0.2 0 -0.02" contype="1"/>
    <geom type="cylinder" size="0.04 0.025" pos="0 0 0.025"/>
    <body name="pan" gravcomp="1">
      <joint name="{JOINTS[0]}" axis="0 0 1" {ranges[0]}/>
      <geom {rod} fromto="0 0 0.05 {x} 0 {z}"/>
      <body name="upper_arm" pos="{x} 0 {z}" gravcomp="1">
        <joint name="{JOINTS[1]}" axis="0 1 0" {ranges[1]}/>
        <geom {rod} fromto="0 0 0 0 0 {UPPER_ARM}"/>
        <body name="forearm" pos="0 0 {UPPER_ARM}" gravcomp="1">
          <joint name="{JOINTS[2]}" axis="0 1 0" {ranges[2]}/>
          <geom {rod} fromto="0 0 0 {FOREARM} 0 0"/>
          <body name="wrist" pos="{FOREARM} 0 0" gravcomp="1">
            <joint name="{JOINTS[3]}" axis="0 1 0" {ranges[3]}/>
            <geom {rod} fromto="0 0 0 0.05 0 0"/>
            <body name="hand" pos="0.05 0 0" gravcomp="1">
              <joint name="{JOINTS[4]}" axis="1 0 0" {ranges[4]}/>
              <geom {rod} fromto="0 0 0 0.04 0 0"/>
              <geom {jaw} pos="{HAND - 0.07} -0.006 0"/>
              <body name="jaw" gravcomp="1">
                <joint name="gripper" type="slide" axis="0 1 0" range="0 {OPEN}"/>
                <geom {jaw} pos="{HAND - 0.07} 0.006 0"/>
              </body>
              <site name="tool" pos="{HAND - 0.05} 0 0" size="0.005"/>
            </body>
          </body>
        </body>
      </body>
    </body>
  </worldbody>
  <actuator>
    {servos}
    <position name="gripper" joint="gripper" kp="100" kv="2" ctrlrange="0 {OPEN}"/>
  </actuator>
</mujoco>
"""
