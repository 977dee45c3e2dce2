"""The server of a service: base, engine and training slots, and the web server in a thread, from `start` to a stop."""

import dataclasses
import socket
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import override

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.layers.wrappers.base import plain_config
from axlearn_like.tokenizers.protocol import Tokenizer
from mesh import UserError, make_mesh
from rl.controller.fair_share import check_shares, read_quotas
from rl.experiment import RLExperiment
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.serving.policy import SavedWeights, ServedModel, load_params
from rl.serving.service.messages import BaseFacts
from rl.serving.service.row_batches import SlotLimits
from rl.serving.service.service import AdapterService
from rl.serving.service.slots import TrainingSlots
from rl.serving.service.training_tasks import ServiceLimits
from rl.serving.service.wire.app import ServiceApp
from rl.serving.service.wire.openai import OpenAIRoutes
from rl.serving.service.wire.promises import Promises
from rl.serving.service.wire.tenants import Tenants
from rl.serving.web.thread import WebThread

_FEWEST = 512  # tokens of a training program


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Settings of a service."""

    name: str  # name of the base, as clients give it
    state: Path  # directory of saved adapters and accepted requests
    slots: int = 32  # adapters that are trained, and that are in the engine, at a time
    rank: int = 32  # largest rank of an adapter
    tokenizer: str | None = None  # directory of the base's tokenizer in Hugging Face's form; None: it has none
    limits: ServiceLimits = ServiceLimits()  # limits of tenants


def make_service(
    experiment: RLExperiment | ServedModel, weights: SavedWeights | None, settings: ServiceSettings
) -> AdapterService:
    """Return a service of an experiment's policy with weights (None: those that it begins with), both threads started.

    Raises:
        UserError: the policy has adapters of its own, or no matrix that can be adapted.
    """
    policy = experiment.cfg.policy
    if plain_config(policy) != policy:
        raise UserError(f"{settings.name}: a base with adapters of its own; merge them first, see axl convert export")
    length = experiment.cfg.max_prompt_tokens + experiment.cfg.max_new_tokens
    limits = SlotLimits(slots=settings.slots, rank=settings.rank, context_length=length, tokens=max(_FEWEST, length))
    mesh = make_mesh(experiment.engine_cfg.mesh)
    params = load_params(experiment, weights, mesh)
    slots = TrainingSlots(policy, params, limits, mesh)
    room = AdapterLimits(settings.slots, settings.rank, tuple(slots.known))
    engine = experiment.make_engine(adapters=room, keep_completions=True)
    engine.set_weights(params, 0 if weights is None else weights.version)
    base = BaseFacts(settings.name, length, settings.rank, slots.vocab_size, engine.cfg.stop_tokens, settings.tokenizer)
    return AdapterService(base, engine, slots, settings.state, settings.limits)


class ServiceServer(Configurable):
    """A service over HTTP, in a thread of this process."""

    class Config(ConfigBase["ServiceServer"]):
        max_body: int = 16 << 20  # limit of a request's bytes
        max_connections: int = 1024  # limit of open connections; a further one closes the longest idle one
        hold: float = 40.0  # seconds that a question for a result waits for it
        session_timeout: float = 600.0  # seconds without a sign of a client until its models are saved and unloaded
        grace: float = 2.0  # seconds for unfinished requests after a stop; clients ask again
        shares: dict[str, float] = {}  # weights of tenants; 1 for others
        # Limits of tenants, of training and of sampling each: {"alice": {"tokens_per_second": 2000.0}}; see `Quota`.
        quotas: dict[str, dict[str, float]] = {}

        @override
        def check_fields(self) -> None:
            self.require_least(1, "max_body", "max_connections")
            self.require(
                "hold", 0 < self.hold < 45, "seconds, more than 0 and less than 45, after which clients ask again"
            )
            self.require("session_timeout", self.session_timeout > 0, "seconds, more than 0")
            self.require_least(0, "grace")

        def limits(self, tenants: Collection[str]) -> ServiceLimits:
            """Return the limits of these tenants (ConfigError: shares or quotas of others, or that cannot be)."""
            check_shares("server.shares", self.shares, tenants, "tenant")
            quotas = read_quotas("server.quotas", self.quotas, tenants, "tenant")
            return ServiceLimits(shares=self.shares, quotas=quotas)

    def __init__(
        self,
        cfg: Config,
        *,
        service: AdapterService,
        keys: Mapping[str, str],
        tokenizer: Tokenizer | None = None,
        limits: tuple[int, int] = (1024, 1024),
    ):
        """Begin without requests.

        Args:
            service: trains and samples; closed at the end.
            keys: {tenant: API key}.
            tokenizer: tokenizer of the base, for OpenAI's completions; None: there are none.
            limits: tokens of a prompt and of an answer there.
        """
        self.cfg, self.service = cfg, service
        self._tenants = Tenants(keys, service, cfg.session_timeout)
        promises = Promises(service, cfg.hold)
        openai = None if tokenizer is None else OpenAIRoutes(service, self._tenants, tokenizer, limits)
        sizes = {"max_body": cfg.max_body, "connections": cfg.max_connections}
        self.app = ServiceApp(service, self._tenants, promises, openai=openai, **sizes)
        self._web = WebThread(self.app.asgi, cfg.max_connections, cfg.grace)

    def start(self, listener: socket.socket) -> None:
        """Answer on a bound socket, until `stop`."""
        self._web.start(listener, beside=self._tenants.end_vanished)

    def wait(self, stopped: Callable[[], bool]) -> None:
        """Wait until `stopped()`, or until the web server or a thread of the service has ended by itself."""
        self._web.wait(stopped, lambda: self.service.failure() is None)

    def stop(self) -> None:
        """Take no more requests, and end what runs; clients that wait ask the next service of this directory."""
        self._web.stop(self.cfg.grace + 5.0)
        self.service.close()
