"""Log a search to MLflow: `pip install mlflow`, then `python examples/mlflow_callback.py`.

Set MLFLOW_TRACKING_URI to choose where it is logged.
"""

from dataclasses import asdict

import mlflow

import nas


class MlflowCallback(nas.Callback):
    """Log one step per trial, in the order in which trials end, and the front and the report as artifacts."""

    def __init__(self, experiment: str = "private-inference-nas") -> None:
        self.experiment = experiment
        self.num_ended = 0

    def run_started(self, run: nas.Run) -> None:
        mlflow.set_experiment(self.experiment)
        mlflow.start_run(run_name=run.folder.name)
        mlflow.log_params(asdict(run.config))

    def trial_ended(self, record: nas.Record) -> None:
        metrics = {"latency_s": record.latency_s, "sent_bytes": record.sent_bytes}
        if record.perplexity is not None:
            metrics["perplexity"] = record.perplexity
        mlflow.log_metrics(metrics, step=self.num_ended)
        self.num_ended += 1

    def run_ended(self, run: nas.Run) -> None:
        mlflow.log_metric("hypervolume_s_nat", run.summary.hypervolume)
        for name in ("pareto.csv", "report.html"):
            if (run.folder / name).exists():
                mlflow.log_artifact(str(run.folder / name))
        mlflow.end_run()


if __name__ == "__main__":
    nas.Study(budget_latency="5min", time_budget="14min").run(callbacks=[MlflowCallback()])
