"""Words of other libraries (Stable-Baselines3, LeRobot) and what to write; imports nothing."""

from __future__ import annotations

SIZES = 'policy={"name": "gaussian", "hidden": [64, 64]}'
LEARNER = 'learner={"name": NAME, ...} (embodied show learner=NAME)'
WORDS = {
    **dict.fromkeys(("total_timesteps", "timesteps", "num_train_steps"), "steps=N"),
    **dict.fromkeys(("learning_rate", "lr"), f"lr (sac, td3: actor_lr, critic_lr) in {LEARNER}"),
    **dict.fromkeys(("gamma", "batch_size", "tau", "ent_coef"), LEARNER),
    **dict.fromkeys(("n_envs", "n_environments"), "num_envs=N"),
    **dict.fromkeys(("net_arch", "policy_kwargs", "hidden"), SIZES),
    **dict.fromkeys(("features_extractor_class", "extractor"), 'policy={..., "extractor": MyNet}'),
    **dict.fromkeys(("tensorboard_log", "tensorboard"), 'log="tensorboard"'),
    "wandb": 'log="wandb"',
    "buffer_size": 'data={"replay_size": N}',
    "learning_starts": 'data={"warmup_steps": N}',
    "n_eval_episodes": "episodes=N of em.evaluate, eval={'episodes': N} of em.train",
    "eval_freq": "eval_every=N",
    "save_freq": "save_every=N",
    "output_dir": "out=FOLDER",
    "dataset": "demos=...",
    "env_id": 'env="Pendulum-v1"',
    "algo": 'learner="sac"',
    "render_mode": "nothing: agent.video(FILE) and agent.view() draw",
    "predict.deterministic": "nothing: predict acts without exploration noise",
}
"""What Stable-Baselines3, LeRobot and others call a keyword, and what to write."""
NAMES = {
    **dict.fromkeys(("make", "make_vec", "make_vec_env"), "em.make_env(ENV, num_envs=N)"),
    **dict.fromkeys(("evaluate_policy", "eval"), "em.evaluate(agent)"),
    **dict.fromkeys(("learn", "fit"), "agent.train(steps=N)"),
    **dict.fromkeys(("select_action", "act", "get_action", "forward"), "agent.predict(obs)"),
    **dict.fromkeys(("record_video", "render"), "agent.video(FILE)"),
    **dict.fromkeys(("save_pretrained", "push_to_hub"), "agent.save(FOLDER)"),
    **dict.fromkeys(("history", "logger"), "agent.metrics"),
    "from_pretrained": "em.load(FOLDER)",
}
"""What they call a function or a method, and what to write."""


def instead(name: str) -> str:
    """The end of the message about a missing `name`; empty for one that no library has."""
    return f": write {NAMES[name]}" if name in NAMES else ""
