"""Log a search to Weights & Biases: `pip install wandb`, then `python examples/wandb_callback.py`.

Set WANDB_MODE=offline to use it without an account.
"""

from dataclasses import asdict

import wandb

import nas


class WandbCallback(nas.Callback):
    """Log one step per trial, and the front as a table."""

    def __init__(self, project: str = "private-inference-nas") -> None:
        self.project = project

    def run_started(self, run: nas.Run) -> None:
        wandb.init(project=self.project, name=run.folder.name, config=asdict(run.config))

    def trial_ended(self, record: nas.Record) -> None:
        wandb.log(
            {
                "architecture": record.notation,
                "status": record.status,
                "perplexity": record.perplexity,
                "latency_s": record.latency_s,
                "sent_bytes": record.sent_bytes,
            }
        )

    def run_ended(self, run: nas.Run) -> None:
        wandb.summary["hypervolume_s_nat"] = run.summary.hypervolume
        rows = [[one.notation, one.latency_s, one.perplexity, one.num_seeds] for one in run.front]
        wandb.log({"front": wandb.Table(columns=["architecture", "latency_s", "perplexity", "seeds"], data=rows)})
        wandb.finish()


if __name__ == "__main__":
    nas.Study(budget_latency="5min", time_budget="14min").run(callbacks=[WandbCallback()])
