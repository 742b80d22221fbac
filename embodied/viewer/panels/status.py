"""What is going on, in words: the step, what came of it, who acts, what is wrong."""

from __future__ import annotations

from embodied.viewer.panels.plots import is_discrete
from embodied.viewer.session.episode import success_by
from embodied.viewer.session.player import Player
from embodied.viewer.session.session import Session


def status(session: Session, undrawn: int, known: str, problem: str) -> str:
    """As Markdown; `undrawn` shapes cannot be drawn, `known` is what the run measured of who acts,
    `problem` what stopped the play."""
    step = session.episode.moments[0].step + session.at
    lines = [f"Step **{step}** of {session.length - 1} · {step * session.spec.dt:.2f} s"]
    lines += [standing(each, len(session.both) > 1) for each in session.both]
    lines.append(f"Acting: {session.chosen}{last_action(session)}")
    if undrawn:
        lines.append(f"{undrawn} height fields or other shapes are not drawn")
    trial = session.trial and f"Trial: {session.trial}"
    witness = session.witness
    lines += filter(None, (known, witness.flat, witness.trouble, session.trouble, trial))
    if problem:
        lines.append(f"**Stopped:** {problem}")
    return "  \n".join(lines)


def standing(player: Player, named: bool) -> str:
    """What has come of an episode up to the moment that is looked at."""
    past = player.episode.moments[: player.at + 1]
    success = {None: "unknown", True: "**yes**", False: "no"}[success_by(past)]
    text = f"Return **{sum(moment.reward for moment in past):.3g}** · success {success}"
    text = f"{text} · *{past[-1].end}*" if past[-1].end else text
    return f"{player.name or player.chosen}: {text}" if named else text


def last_action(player: Player) -> str:
    """The name of the last of discrete actions."""
    moments, act = player.episode.moments, player.spec.act
    action = moments[min(player.at, len(moments) - 1)].action
    if not (is_discrete(act) and act.names and action):
        return ""
    return f" · **{act.names[int(action[0])]}**"
