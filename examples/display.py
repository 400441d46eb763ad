"""What the examples record, show and draw: the training loops are in the examples themselves."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

from envfleet import Evaluation, Rollout
from envfleet.contract.stats import RunStats

# -- the record of a training --


@dataclass(frozen=True, kw_only=True)
class Update:
    """Where a training stands after an update."""

    num_steps: int  # env steps so far
    num_updates: int
    elapsed_s: float  # since the training began: starting the workers counts
    mean_return: float | None  # None: no episode has ended
    lag: int  # of the rollout: by how many versions its oldest policy was behind
    losses: dict[str, float]  # of the last minibatch
    stats: RunStats  # when the rollout had come


@dataclass(kw_only=True)
class TrainingRun:
    """The record of a training, filled in by its loop. Points are (env steps so far, return)."""

    num_mean_episodes: int  # the mean return is taken over this many last episodes
    started_s: float = field(default_factory=time.perf_counter)
    duration_s: float = 0.0
    collect_s: float = 0.0  # of it: starting the workers, and waiting for rollouts
    num_steps: int = 0
    num_updates: int = 0
    target_reached: bool = False
    episodes: list[tuple[int, float]] = field(default_factory=list)  # each finished episode
    curve: list[tuple[int, float]] = field(default_factory=list)  # the mean return at each update
    lags: list[int] = field(default_factory=list)  # of each rollout, in versions
    pulls: list[tuple[int, ...]] = field(default_factory=list)  # of each worker, up to each update
    divergences: list[float | None] = field(default_factory=list)  # the largest of any worker, at each update
    stats: Any = None  # envfleet's RunStats, of the last rollout or at the end
    evaluation: Evaluation | None = None  # at the end
    exit_code: int = 0  # of the program; not 0 if it was told to stop

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s

    @property
    def mean_return(self) -> float | None:
        """Of the last episodes; None: none has ended."""
        returns = [episode_return for _, episode_return in self.episodes[-self.num_mean_episodes :]]
        return float(np.mean(returns)) if returns else None

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Count the time that the learner waits for rollouts."""
        since_s = time.perf_counter()
        yield
        self.collect_s += time.perf_counter() - since_s

    def add(self, rollout: Rollout) -> None:
        self.lags.append(rollout.lag)
        self.add_steps(rollout.num_steps * rollout.num_envs, rollout.episode_returns.tolist())

    def add_steps(self, num_steps: int, returns: Iterable[float]) -> None:
        """Count env steps, and the returns of episodes that ended in them."""
        self.num_steps += num_steps
        self.episodes += [(self.num_steps, episode_return) for episode_return in returns]

    def add_update(self, target: float | None) -> None:
        """Count an update; a mean return of at least `target` ends the training."""
        self.num_updates += 1
        mean_return = self.mean_return
        if mean_return is not None:
            self.curve.append((self.num_steps, mean_return))
            # A few lucky episodes prove nothing: the mean counts once it is over as many as it says.
            is_full = len(self.episodes) >= self.num_mean_episodes
            self.target_reached = target is not None and is_full and mean_return >= target
        self.duration_s = self.elapsed_s

    def add_stats(self, stats: RunStats) -> None:
        """Keep what the cluster says at an update."""
        self.stats = stats
        self.pulls.append(tuple(each.num_pulls for each in stats.workers))
        self.divergences.append(largest_divergence(stats))

    def finish(self, stats: RunStats) -> "TrainingRun":
        self.stats, self.duration_s = stats, self.elapsed_s
        return self

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint. A long training has many episodes, so lists are arrays in it."""
        divergences = [np.nan if each is None else each for each in self.divergences]
        return {
            **{name: getattr(self, name) for name in _COUNTERS},
            "elapsed_s": self.elapsed_s,
            "episodes": np.reshape(self.episodes, (-1, 2)),
            "curve": np.reshape(self.curve, (-1, 2)),
            "lags": np.array(self.lags, np.int64),
            "pulls": np.array(self.pulls, np.int64),
            "divergences": np.array(divergences, np.float64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; the time since this process began counts, too."""
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.started_s -= state["elapsed_s"]
        self.episodes, self.curve = (
            [(int(num_steps), mean) for num_steps, mean in state[name].tolist()] for name in ("episodes", "curve")
        )
        self.lags = state["lags"].tolist()
        self.pulls = [tuple(each) for each in state["pulls"].tolist()]
        self.divergences = [None if np.isnan(each) else each for each in state["divergences"].tolist()]

    def update(self, losses: dict[str, float]) -> Update:
        return Update(
            num_steps=self.num_steps,
            num_updates=self.num_updates,
            elapsed_s=self.elapsed_s,
            mean_return=self.mean_return,
            lag=self.lags[-1],
            losses=losses,
            stats=self.stats,
        )

    @property
    def num_versions(self) -> int:
        """That were published."""
        return self.stats.version

    @property
    def num_pulls(self) -> list[int]:
        """By each worker."""
        return [each.num_pulls for each in self.stats.workers]

    @property
    def weight_bytes(self) -> int:
        return sum(each.weight_bytes for each in self.stats.workers)

    @property
    def announcement_bytes(self) -> int:
        return sum(each.announcement_bytes for each in self.stats.workers)


_COUNTERS = ("num_steps", "num_updates", "target_reached", "duration_s", "collect_s")  # as they are, in a checkpoint


def largest_divergence(stats: RunStats) -> float | None:
    return max((each.divergence for each in stats.workers if each.divergence is not None), default=None)


def env_metrics(stats: RunStats) -> dict[str, float]:
    """What the env's infos say at the ends of episodes, on average: at most 5 numbers, to fit into a line."""
    own = {name: mean for name, mean in stats.metrics.items() if name not in ("episode_return", "episode_length")}
    return dict(list(own.items())[:5])


# -- while it goes on --


class Bar:
    """A live bar where stderr is a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, settings: Any, first_text: str, *, at_most: bool, line_every_s: float = 5.0) -> None:
        self._total_steps, self._at_most = settings.total_steps, at_most
        self._line_every_s = self._next_line_s = line_every_s
        columns = [BarColumn(None), *(["at most"] if at_most else []), TimeRemainingColumn(compact=True), "left"]
        is_live = sys.stderr.isatty()
        console = Console(stderr=True)
        self._bar = Progress("{task.description}", *columns, console=console, expand=True, disable=not is_live)
        self._task = self._bar.add_task(f"{settings.env_id}: {first_text}", total=settings.total_steps)

    def show(self, num_steps: int, elapsed_s: float, text: str) -> None:
        """Show `text` after the number of steps and their speed."""
        steps_per_s = num_steps / elapsed_s
        text = f"{num_steps:,} steps, {steps_per_s:,.0f} steps/s{text}"
        self._bar.update(self._task, completed=num_steps, description=text)
        if self._bar.disable and elapsed_s >= self._next_line_s:
            self._next_line_s = elapsed_s + self._line_every_s
            left_s = max(0, self._total_steps - num_steps) / steps_per_s
            print(text + (f", at most {left_s:.0f} s left" if self._at_most else ""), file=sys.stderr, flush=True)

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class ProgressDisplay:
    """The bar, with any numbers; TensorBoard if `settings.tensorboard` names a folder."""

    def __init__(self, settings: Any) -> None:
        self._bar = Bar(settings, "first rollout", at_most=False)
        self._writer = tensorboard_writer(settings.tensorboard) if settings.tensorboard else None

    def update(self, run: TrainingRun, numbers: dict[str, float]) -> None:
        mean_return = run.mean_return
        numbers = numbers if mean_return is None else {"mean return": mean_return, **numbers}
        numbers |= {} if run.stats is None else env_metrics(run.stats)
        text = "".join(f", {name} {number:.4g}" for name, number in numbers.items())
        self._bar.show(run.num_steps, run.elapsed_s, text)
        if self._writer is not None:
            for name, number in numbers.items():
                self._writer.add_scalar(name.replace(" ", "_"), number, run.num_steps)

    def __enter__(self) -> "ProgressDisplay":
        self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.__exit__()
        if self._writer is not None:
            self._writer.close()


class UpdateDisplay:
    """The bar, for examples that tell of each Update."""

    def __init__(self, settings: Any) -> None:
        self.bar = Bar(settings, "workers start", at_most=True)

    def update(self, update: Update) -> None:
        text = (
            f", mean return {in_words(update.mean_return)}, lag {update.lag}, "
            f"{mean_pulls(update.stats)} pulls in {update.num_updates} updates"
        ) + "".join(f", {name} {mean:.4g}" for name, mean in env_metrics(update.stats).items())
        self.bar.show(update.num_steps, update.elapsed_s, text)


class LiveDisplay:
    """A table, drawn anew at each Update, where stdout is a terminal; a plain line every few seconds elsewhere."""

    def __init__(self, settings: Any, line_every_s: float = 5.0) -> None:
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
        divergences = ("unknown" if each.divergence is None else f"{each.divergence:.4f}" for each in workers)
        facts = {
            "mean return": f"{in_words(update.mean_return)} (target {in_words(self._settings.target)})",
            "env steps": f"{update.num_steps:,} in {update.elapsed_s:.0f} s, now {steps_per_s:,.0f} a second",
            "lag": f"{listed(each.lag for each in workers)} versions",
            "divergence": f"{listed(divergences)} (pull above {self._settings.threshold:g})",
            "pulls": f"{listed(each.num_pulls for each in workers)} made, "
            f"{listed(update.stats.version - each.num_pulls for each in workers)} avoided",
            "time left": f"at most {left_s:.0f} s",
            **{name: f"{mean:.4g}" for name, mean in env_metrics(update.stats).items()},
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


def tensorboard_writer(log_dir: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SystemExit("--tensorboard needs the package tensorboard: pip install tensorboard") from error
    return SummaryWriter(log_dir)


def tensorboard_log(log_dir: str) -> Callable[[Update], None]:
    """A function that logs each Update."""
    writer = tensorboard_writer(log_dir)

    def log(update: Update) -> None:
        scalars = {
            "return": update.mean_return,
            "lag": update.lag,
            "pulls": mean_pulls(update.stats),
            "divergence": largest_divergence(update.stats),
            "steps_per_s": update.num_steps / update.elapsed_s,
            **{f"loss/{name}": loss for name, loss in update.losses.items()},
            **{f"env/{name}": mean for name, mean in update.stats.metrics.items()},
        }
        for name, value in scalars.items():
            if value is not None:
                writer.add_scalar(name, value, update.num_steps)
        writer.flush()

    return log


# -- in words and pictures --


def in_words(mean_return: float | None) -> str:
    return "unknown (no episode has ended)" if mean_return is None else f"{mean_return:.1f}"


def listed(values: Iterable[object]) -> str:
    return " and ".join(map(str, values))


def mean_pulls(stats: RunStats) -> float:
    """For each worker, on average."""
    return round(sum(each.num_pulls for each in stats.workers) / len(stats.workers), 1)


def summary_of(run: TrainingRun, settings: Any) -> str:
    """Of a training that published many versions."""
    num_mean = min(len(run.episodes), settings.num_mean_episodes)
    returns = f"mean return of the last {num_mean} episodes {run.mean_return:.1f}" if num_mean else "no episode ended"
    num_pulls = sum(run.num_pulls) / len(run.num_pulls)
    return (
        f"{settings.env_id}: {returns}, after {run.num_steps:,} steps in {run.duration_s:.1f} s.\n"
        f"{run.num_versions:,} versions published; each worker pulled {num_pulls:,.0f} on average, "
        f"1 in {run.num_versions / max(1.0, num_pulls):,.0f} ({settings.sync}).\n{run.stats}"
    )


def draw_learning_curve(run: TrainingRun, settings: Any, path: Path) -> None:
    figure, (axes,) = _figure(8, 1)
    _draw_returns(axes, run, settings)
    _finish(figure, [axes], path)


def draw_returns_and_pulls(run: TrainingRun, settings: Any, path: Path) -> None:
    """The learning curve, and the pulls against those of "every update": Figures 2 and 3 of the ClusterEnv paper."""
    figure, (returns, pulls) = _figure(12, 2)
    _draw_returns(returns, run, settings)
    updates = np.arange(1, run.num_updates + 1)
    pulls.plot(updates, updates, color="C3", linestyle="--", label="every update")
    for worker, counts in enumerate(np.transpose(run.pulls)):
        pulls.step(updates, counts, where="post", label=f"{settings.sync}, worker {worker}")
    pulls.set(xlabel="updates", ylabel="pulls so far", title=f"Weights pulled, threshold {settings.threshold:g}")
    _finish(figure, [returns, pulls], path)


def _figure(width: float, num_axes: int) -> tuple[Any, Sequence[Any]]:
    from matplotlib.figure import Figure  # here: workers that import an example need no plots

    # A Figure without pyplot draws with Agg: it needs no display.
    figure = Figure(figsize=(width, 4.5), layout="constrained")
    return figure, figure.subplots(1, num_axes, squeeze=False)[0]


def _draw_returns(axes: Any, run: TrainingRun, settings: Any) -> None:
    axes.plot(*np.reshape(run.episodes, (-1, 2)).T, "C0.", alpha=0.3, markersize=3, label="one episode")
    mean_label = f"mean of the last {settings.num_mean_episodes} episodes"
    axes.plot(*np.reshape(run.curve, (-1, 2)).T, "C0", linewidth=2, label=mean_label)
    if settings.target is not None:
        axes.axhline(settings.target, color="C3", linestyle="--", label=f"target: {settings.target:g}")
    axes.set(xlabel="env steps", ylabel="return", title=f"PPO on {settings.env_id}, seed {settings.seed}")
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _finish(figure: Any, every_axes: Sequence[Any], path: Path) -> None:
    for axes in every_axes:
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)
