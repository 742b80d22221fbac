"""The status text: step, return, success, policy, problems."""

from __future__ import annotations

from embodied.viewer.panels.plots import is_discrete
from embodied.viewer.session.episode import success_by
from embodied.viewer.session.player import Player
from embodied.viewer.session.session import Session


def status(session: Session, undrawn: int, known: str, problem: str) -> str:
    """The status as Markdown; `undrawn` is the number of shapes that cannot be drawn, `known` what
    the run measured of the policy, `problem` the error that stopped playback."""
    step = session.episode.moments[0].step + session.at
    lines = [f"Step **{step}** of {session.length - 1} · {step * session.spec.dt:.2f} s"]
    lines += [standing(each, len(session.sessions) > 1) for each in session.sessions]
    whose = f" of {session.name}" if len(session.sessions) > 1 and session.name else ""
    lines.append(f"Policy{whose}: {session.chosen}{last_action(session)}")
    if undrawn:
        lines.append(f"{undrawn} shapes are not drawn (height fields, for example)")
    trial = session.trial and f"Disturbances: {session.trial}"
    recorder = session.recorder
    lines += filter(
        None, (known, recorder.no_scene_reason, recorder.render_error, session.trouble, trial)
    )
    if problem:
        lines.append(f"**Stopped:** {problem}")
    return "  \n".join(lines)


def standing(player: Player, named: bool) -> str:
    """Return and success of an episode up to the displayed step."""
    past = player.episode.moments[: player.at + 1]
    success = {None: "unknown", True: "**yes**", False: "no"}[success_by(past)]
    head = f"{player.name or player.chosen}: return" if named else "Return"
    text = f"{head} **{sum(moment.reward for moment in past):.3g}** · success {success}"
    return f"{text} · *{past[-1].end}*" if past[-1].end else text


def last_action(player: Player) -> str:
    """The name of the last discrete action."""
    moments, act = player.episode.moments, player.spec.act
    action = moments[min(player.at, len(moments) - 1)].action
    if not (is_discrete(act) and act.names and action):
        return ""
    return f" · **{act.names[int(action[0])]}**"
