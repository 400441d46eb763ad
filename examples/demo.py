"""The demo: PPO on LunarLander-v3, two local workers that pull new weights only when their policy has drifted (APS).

    make demo
    python examples/demo.py --seed 7 --threshold 0.05

Stops once the last 100 episodes return 200 on average. Writes demo.png, summary.txt and summary.json into --output-dir.
"""

import dataclasses
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from command_line import setting, settings_from_command_line
from display import LiveDisplay, TrainingRun, draw_returns_and_pulls, in_words
from ppo import Settings, train


@dataclass(frozen=True, kw_only=True)
class DemoSettings(Settings):
    """Those of ppo.py, with values for LunarLander-v3."""

    output_dir: str = setting("runs/demo", "where the picture and the summary go")


DEMO = DemoSettings(
    env_id="LunarLander-v3",
    num_envs_per_worker=32,
    total_steps=1_000_000,
    target=200.0,
    num_epochs=4,
    num_minibatches=32,
    discount=0.999,
    gae_lambda=0.98,
    reward_scale=0.05,
)


@dataclass(frozen=True, kw_only=True)
class Savings:
    """What the rule saved against a pull of every worker at every update. Counts and bytes are of all workers."""

    num_pulls: int
    num_pulls_avoided: int
    weight_bytes: int
    announcement_bytes: int  # and orders to collect
    every_update_bytes: int  # of weights alone: its announcements are left out, so the saving is not overstated
    measure_s: float
    measure_share: float  # of the whole time


def savings_of(run: TrainingRun) -> Savings:
    workers = run.stats.workers
    num_pulls = sum(each.num_pulls for each in workers)
    num_possible = run.stats.version * len(workers)
    weight_bytes = sum(each.weight_bytes for each in workers)
    return Savings(
        num_pulls=num_pulls,
        num_pulls_avoided=num_possible - num_pulls,
        weight_bytes=weight_bytes,
        announcement_bytes=sum(each.announcement_bytes for each in workers),
        every_update_bytes=round(weight_bytes / max(num_pulls, 1) * num_possible),
        measure_s=run.stats.measure_s,
        measure_share=run.stats.measure_s / run.duration_s,
    )


def summary_in_words(run: TrainingRun, settings: DemoSettings, savings: Savings) -> str:
    weights, announcements = kilobytes(savings.weight_bytes), kilobytes(savings.announcement_bytes)
    spared_bytes = savings.every_update_bytes - savings.weight_bytes - savings.announcement_bytes
    num_last = min(len(run.episodes), settings.num_mean_episodes)
    end = (
        ""
        if settings.target is None
        else f" (target {settings.target:g}: {'' if run.target_reached else 'not '}reached)"
    )
    return (
        f"{settings.env_id}, seed {settings.seed}: the last {num_last} episodes returned "
        f"{in_words(run.mean_return)} on average{end}.\n"
        f"{run.num_steps:,} env steps in {run.duration_s:.0f} s, {run.num_updates} updates; "
        f"{run.collect_s:.0f} s of it the learner waited for rollouts.\n"
        f"Pulls: {savings.num_pulls} made, {savings.num_pulls_avoided} avoided by {settings.num_workers} workers "
        f"({settings.sync}).\n"
        f"Sent: {weights} of weights and {announcements} of announcements. Weights at every update would be "
        f"{kilobytes(savings.every_update_bytes)}: {kilobytes(spared_bytes)} spared.\n"
        f"Measuring the divergence took {savings.measure_s:.2f} s, {savings.measure_share:.2%} of the time.\n"
        f"Evaluation without chance: {run.evaluation or 'none'}."
    )


def kilobytes(num_bytes: int) -> str:
    return f"{num_bytes / 1000:,.0f} kB"


def main() -> int:
    settings = settings_from_command_line(DEMO, __doc__)
    display = LiveDisplay(settings)
    with display.live if display.is_live else nullcontext():
        run = train(settings, on_update=display.update)

    output_dir = Path(settings.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    picture = output_dir / "demo.png"
    draw_returns_and_pulls(run, settings, picture)
    savings = savings_of(run)
    words = summary_in_words(run, settings, savings)
    (output_dir / "summary.txt").write_text(words + "\n")
    summary = {
        "target_reached": run.target_reached,
        "mean_return": run.mean_return,
        "num_episodes": len(run.episodes),
        "num_steps": run.num_steps,
        "num_updates": run.num_updates,
        "duration_s": round(run.duration_s, 3),
        "collect_s": round(run.collect_s, 3),
        **dataclasses.asdict(savings),
        "settings": dataclasses.asdict(settings),
    }
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"{words}\nPicture and summary: {picture}, {output_dir / 'summary.txt'}")
    return run.exit_code or int(settings.require_target and not run.target_reached)


if __name__ == "__main__":
    sys.exit(main())
