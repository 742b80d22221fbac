"""The model card of a SimClip as Markdown."""

from __future__ import annotations

from typing import Any

from embodied.vision.perturbations import CHANGES, TIES

SENTENCES = {
    "negated": "the goal, negated",
    "negated, cosine": "the goal, negated; cosine",
    "unrelated": "unrelated, highest of three; cosine",
}


def card_markdown(card: dict[str, Any]) -> str:
    """The model card as Markdown."""
    plan, columns = card["plan"], ("auc", "auc_held_out", "rung", "rung_beside", "retrieval")
    lines = [
        "# simclip",
        "",
        "A small image-text dual encoder, distilled from the states of our simulators. It is valid",
        "for the environments and sentences below, not for language in general. Rewards that use",
        "it show that the method works, not that a model understands images.",
        "",
        f"Trained for {plan['steps']} steps on batches of {plan['batch']} images with captions, "
        f"and {plan['polish']} steps",
        f"of the image head alone (seed {plan['seed']}). The last session took {card['minutes']} "
        "minutes, rendering",
        "included. Images were augmented in background, colours, light, camera, sharpness and",
        "noise; their scenes were rendered with one light and one camera.",
        "Evaluated on scenes of another seed; one in seven phrasings of each fact was held out.",
        "",
        "| environment | images | fact AUC | AUC, held-out phrasings | rung accuracy | within one "
        "rung | retrieval (chance) | ladder ~ progress | cosine ~ progress | constant steps | "
        "empty / initial |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for env, row in card["worlds"].items():
        cells = [f"{row[name]:.2f}" for name in columns[:-1]]
        cells += [f"{row['retrieval']:.2f} ({row['chance']:.2f})"]
        cells += [f"{row['ladder']:.2f}", f"{row['cosine']:.2f}", f"{row['flat']:.0%}"]
        cells += [f"{row['nothing']:.2f} / {row['start']:.2f}"]
        lines.append(f"| {env} | {row['pictures']} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "`ladder ~ progress`: Spearman correlation between the expected position on a ladder of",
        "captions and the true one, along scripted successful episodes; `cosine ~ progress`: the",
        "same for the cosine similarity to the last caption. `constant steps`: steps in which the",
        "ladder score changes by less than 0.001. `empty / initial`: ladder score of an empty",
        "image and of initial states.",
        "",
        *perturbation_lines(card),
        "",
        "## Limitations",
        "",
        *[
            f"- {env}: the facts with the lowest AUC are {', '.join(row['worst'])}."
            for env, row in card["worlds"].items()
        ],
        "- Depth along the viewing direction in a single view: an object in front of or behind",
        "  another one looks close to it unless one hides the other. The FR3 images show the front",
        "  and wrist cameras side by side (env.portraits=[front,wrist]), a quarter of them the",
        "  front camera alone.",
        "- Anything without captions: speeds, other objects, robots and environments.",
        "  A sentence of mostly unknown words has no ladder, and its similarity means nothing:",
        "  `reward=clip` scores it 0 everywhere.",
        "- Negations are read by a rule (the ladder of the opposite, from best to worst); the",
        "  cosine does not know them. Words outside of the training captions, numbers.",
        "",
    ]
    return "\n".join(lines)


def perturbation_lines(card: dict[str, Any]) -> list[str]:
    """The card's table of changed images and other sentences."""
    rows = card["worlds"]
    lines = [
        "## Changed images and other sentences",
        "",
        "`ladder ~ progress`, mean (lowest of twelve episodes), in images that were changed after",
        "they were rendered. `another background`: what most images have in a place is replaced,",
        "be it the table's edge, a wall or a goal that never moves. The last row is the most that",
        "a score can reach which is not exactly constant where progress is.",
        "",
        "| changed | " + " | ".join(rows) + " |",
        "|---" * (len(rows) + 1) + "|",
    ]
    for name in (*CHANGES, TIES):
        cells = [
            f"{row['perturbed'][name][0]:.2f} ({row['perturbed'][name][1]:.2f})"
            for row in rows.values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "The same correlation of the score of another sentence than the goal:",
        "",
        "| sentence | " + " | ".join(rows) + " |",
        "|---" * (len(rows) + 1) + "|",
    ]
    for name, text in SENTENCES.items():
        cells = [f"{row['said'][name]:.2f}" for row in rows.values()]
        lines.append(f"| {text} | " + " | ".join(cells) + " |")
    return lines
