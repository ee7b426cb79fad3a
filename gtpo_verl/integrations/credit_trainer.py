"""verl's V1 trainers with credit assignment by entropy, and nothing else.

The mixin fetches entropies and the verifier's verdicts from TransferQueue and passes them to the estimator. It reads
``config.algorithm`` and the settings of the rollout, all of which verl's own configuration has or may lack.
"""

from collections import Counter

from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, get_trainer_cls
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.context import credit_context
from gtpo_verl.integrations.step.columns import Step
from gtpo_verl.integrations.step.credit import Credit
from gtpo_verl.integrations.step.guide import GuideRows
from gtpo_verl.integrations.step.old_log_probs import OldLogProbs
from gtpo_verl.integrations.vllm.client import EntropyFullyAsyncClient

# Metrics that add up over the updates of a step (`parameter_sync_step`), of which verl would log the mean.
SUMMED = (
    "credit/groups",
    "credit/responses",
    "credit/tail_alive_correct",
    "credit/tail_alive_wrong",
    "rollout_entropy/check_s",
    "rollout_entropy/time_saved_s",
    "training/lone_responses",
)


class CreditTrainer(PPOTrainer):
    """Goes before one of verl's trainers in the bases of a class."""

    update: Step  # the responses of the current update

    def __init__(self, config: DictConfig) -> None:
        self.credit = Credit(config)
        self.old_log_probs = OldLogProbs(config)
        self.guide = GuideRows(config)
        self._sums: Counter[str] = Counter()  # of the current step
        super().__init__(config)

    def get_llm_client(self) -> LLMServerClient:
        client_class = self._client_class(type(super().get_llm_client()))
        manager = getattr(self, "standalone_server_manager", None) or self.llm_server_manager
        return manager.get_client(client_cls=client_class)

    def _client_class(self, stock: type[LLMServerClient]) -> type[LLMServerClient]:
        """verl's client for partial rollouts joins the segments of an interrupted response and drops what it does not
        know, such as entropies.
        """
        partial = issubclass(stock, FullyAsyncLLMServerClient)
        return EntropyFullyAsyncClient if partial and self.old_log_probs.source.from_rollout else stock

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        self._sums.clear()
        batch = super().step(metrics, timing_raw)
        metrics.update(self._sums)
        return batch

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> KVBatchMeta:
        batch = super()._step_once(metrics, timing_raw, sample_batch_size)
        self._sums.update({name: metrics[name] for name in SUMMED if name in metrics})
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        verl_pass = super()._compute_old_log_prob
        self.update = Step(batch, self.credit.threshold)
        return self.old_log_probs.compute(lambda: verl_pass(batch, metrics), self.update, self.global_steps, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        context = self.credit.context(self.update, self.global_steps, guide=self.guide.on)
        try:
            with credit_context(context):
                batch = super()._compute_advantage(batch, metrics)
        except KeyError as error:
            if "rm_scores" not in str(error):
                raise
            raise UserError("the reward function gave no score: it must return a number or a dict with one.") from error
        self.credit.written(self.update)
        if self.guide.on:
            self.guide.use_own_statistics(self.update)
        metrics["training/lone_responses"] = self.credit.zero_lone_responses(self.update)
        metrics.update(self.credit.metrics(self.update, context))
        if self.guide.on:
            metrics.update(self.guide.metrics(self.update))
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.credit.without_truncated(self.update, metrics):
            return super()._update_actor(batch, metrics)


def credit_trainer_class(trainer_mode: str) -> type[CreditTrainer]:
    """verl's trainer of this mode with credit assignment."""
    stock = get_trainer_cls(trainer_mode)
    return type(f"Credit{stock.__name__}", (CreditTrainer, stock), {"__module__": __name__})
