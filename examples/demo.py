"""The demo: PPO on LunarLander-v3, two local workers that pull new weights only when their policy has drifted (APS).

    make demo
    python examples/demo.py --seed 7 --threshold 0.05

Stops once the last 100 episodes return 200 on average. Writes demo.png, summary.txt and summary.json into --output-dir.
"""

import dataclasses
import json
import sys
from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from ppo import Settings, TrainingRun, Update, in_words, setting, settings_from_command_line, train


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


class LiveDisplay:
    """A table, drawn anew at each update, where stdout is a terminal; a plain line every few seconds elsewhere."""

    def __init__(self, settings: DemoSettings, line_every_s: float = 5.0) -> None:
        self._settings = settings
        self._line_every_s = line_every_s
        self._next_line_s = 0.0
        self._lately: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=10)  # (seconds, env steps)
        self.is_live = sys.stdout.isatty()
        self.live = Live("Starting the workers ...", console=Console(), refresh_per_second=4, transient=True)

    def update(self, update: Update) -> None:
        since_s, since_steps = self._lately[0]
        steps_per_s = (update.num_steps - since_steps) / (update.elapsed_s - since_s)
        self._lately.append((update.elapsed_s, update.num_steps))
        left_s = max(0, self._settings.total_steps - update.num_steps) / steps_per_s
        workers = update.stats.workers
        facts = {
            "mean return": f"{in_words(update.mean_return)} (target {in_words(self._settings.target)})",
            "env steps": f"{update.num_steps:,} in {update.elapsed_s:.0f} s, now {steps_per_s:,.0f} a second",
            "lag": f"{listed(each.lag for each in workers)} versions",
            "divergence": f"{listed(divergence_in_words(each.divergence) for each in workers)} "
            f"(pull above {self._settings.threshold:g})",
            "pulls": f"{listed(each.num_pulls for each in workers)} made, "
            f"{listed(update.stats.version - each.num_pulls for each in workers)} avoided",
            "time left": f"at most {left_s:.0f} s",
        }
        if self.is_live:
            self.live.update(self._panel(facts, update.num_steps))
        elif update.elapsed_s >= self._next_line_s:
            self._next_line_s = update.elapsed_s + self._line_every_s
            print("; ".join(f"{name} {fact}" for name, fact in facts.items()), flush=True)

    def _panel(self, facts: dict[str, str], num_steps: int) -> Panel:
        table = Table.grid(padding=(0, 2))
        for name, fact in facts.items():
            table.add_row(name, fact)
        table.add_row("", ProgressBar(total=self._settings.total_steps, completed=num_steps, width=60))
        num_workers = self._settings.num_workers
        title = f"PPO on {self._settings.env_id}: {num_workers} workers, {self._settings.sync} (a value for each)"
        return Panel(table, title=title, expand=False)


def listed(values: Iterable[object]) -> str:
    return " and ".join(map(str, values))


def divergence_in_words(divergence: float | None) -> str:
    return "unknown" if divergence is None else f"{divergence:.4f}"


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
        f"Measuring the divergence took {savings.measure_s:.2f} s, {savings.measure_share:.2%} of the time."
    )


def kilobytes(num_bytes: int) -> str:
    return f"{num_bytes / 1000:,.0f} kB"


def draw(run: TrainingRun, settings: DemoSettings, path: Path) -> None:
    """The learning curve, and the pulls against those of "every update": Figures 2 and 3 of the ClusterEnv paper."""
    # A Figure without pyplot draws with Agg: it needs no display.
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    returns, pulls = figure.subplots(1, 2)
    returns.plot(*np.reshape(run.episodes, (-1, 2)).T, "C0.", alpha=0.3, markersize=3, label="one episode")
    mean_label = f"mean of the last {settings.num_mean_episodes} episodes"
    returns.plot(*np.reshape(run.curve, (-1, 2)).T, "C0", linewidth=2, label=mean_label)
    if settings.target is not None:
        returns.axhline(settings.target, color="C3", linestyle="--", label=f"target: {settings.target:g}")
    returns.set(xlabel="env steps", ylabel="return", title=f"PPO on {settings.env_id}, seed {settings.seed}")
    returns.xaxis.set_major_formatter("{x:,.0f}")

    updates = np.arange(1, run.num_updates + 1)
    pulls.plot(updates, updates, color="C3", linestyle="--", label="every update")
    for worker, counts in enumerate(np.transpose(run.pulls)):
        pulls.step(updates, counts, where="post", label=f"{settings.sync}, worker {worker}")
    pulls.set(xlabel="updates", ylabel="pulls so far", title=f"Weights pulled, threshold {settings.threshold:g}")
    for axes in (returns, pulls):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)


def main() -> int:
    settings = settings_from_command_line(DEMO, (__doc__ or "").partition("\n")[0])
    display = LiveDisplay(settings)
    with display.live if display.is_live else nullcontext():
        run = train(settings, on_update=display.update)

    output_dir = Path(settings.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    picture = output_dir / "demo.png"
    draw(run, settings, picture)
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
    return 1 if settings.require_target and not run.target_reached else 0


if __name__ == "__main__":
    sys.exit(main())
