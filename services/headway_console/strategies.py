"""The Strategies pages: what decides where, switch it, tune it, bind it, watch it in shadow, and take it back."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from google.protobuf import struct_pb2
from google.protobuf.field_mask_pb2 import FieldMask
from headway.admin.v1 import admin_pb2 as pb
from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import StrategyBinding
from headway_scheduler.domain.names import GPU_GROUPS, MODELS, STRATEGIES, STRATEGY_BINDINGS, TENANTS
from headway_scheduler.errors import InvalidField
from headway_scheduler.strategies.registry import Installed

from headway_console.decisions import DecisionLog, DecisionRow, Summary, summary_of
from headway_console.doorkeeper import Visit
from headway_console.effects import Effects
from headway_console.pages import PREFIX, Pages, see_other
from headway_console.parameters import fields_of, values_of
from headway_console.writing import Admin

__all__ = ["StrategyPages"]

_LOOKED_AT = 2_000


@dataclass(frozen=True, slots=True)
class StrategyCard:
    """A strategy in the list."""

    installed: Installed
    algorithm_words: str
    bindings: tuple[StrategyBinding, ...]
    tripped: bool
    lately: Summary

    @property
    def agreement(self) -> float | None:
        """The share of decisions in which it agreed, as a shadow."""
        watched = self.installed.shadow_decisions
        return self.installed.shadow_agreed / watched if watched else None

    @property
    def would_ms(self) -> float | None:
        """The mean TTFT that it predicted, as a shadow, of its own choices."""
        watched = self.installed.shadow_predicted
        return self.installed.shadow_ttft_ms / watched if watched else None

    @property
    def taken_ms(self) -> float | None:
        """The same, of the endpoints that were chosen."""
        watched = self.installed.shadow_predicted
        return self.installed.shadow_taken_ttft_ms / watched if watched else None

    @property
    def gain(self) -> float | None:
        """How much less its own choices would have taken, as a share."""
        taken = self.installed.shadow_taken_ttft_ms
        return 1 - self.installed.shadow_ttft_ms / taken if taken else None


class StrategyPages:
    """Strategies and their bindings."""

    def __init__(self, scheduler: Scheduler, log: DecisionLog, effects: Effects, pages: Pages, admin: Admin) -> None:
        self._scheduler, self._log, self._effects = scheduler, log, effects
        self._pages, self._admin = pages, admin

    async def overview(self, visit: Visit) -> web.Response:
        """All strategies, and what is bound where."""
        desired = self._scheduler.desired
        lately = defaultdict[str, list[DecisionRow]](list)
        for row in self._log.newest(_LOOKED_AT):
            lately[row.strategy].append(row)
        installed = self._scheduler.registry.installed.values()
        cards = [self._card(each, lately[each.config.id]) for each in installed]
        cards.sort(key=lambda card: (not card.bindings, card.installed.config.id))
        return await self._pages.page(
            visit,
            "strategies.html",
            cards=cards,
            shadows=[card for card in cards if any(binding.shadow for binding in card.bindings)],
            bindings=sorted(desired.strategy_bindings, key=lambda each: (each.shadow, each.id)),
            strategies=sorted(desired.strategies),
            tenants=sorted(desired.tenants),
            groups=sorted(desired.groups),
            models=sorted(desired.models),
        )

    async def strategy(self, visit: Visit) -> web.Response:
        """One strategy: its parameters, its revisions, and what each change did."""
        installed = self._installed(visit)
        config = installed.config
        revisions = await self._admin.call(
            visit.principal,
            "ListStrategyRevisions",
            pb.ListStrategyRevisionsRequest(parent=f"{STRATEGIES}/{config.id}", page_size=20),
        )
        return await self._pages.page(
            visit,
            "strategy.html",
            card=self._card(installed, [row for row in self._log.newest(_LOOKED_AT) if row.strategy == config.id]),
            fields=fields_of(self._algorithm(installed).parameters_type, config.parameters),
            fallbacks=sorted(name for name, each in self._scheduler.registry.algorithms.items() if each.classic),
            effects=self._effects.of(config.id),
            revisions=list(revisions.revisions),
        )

    # Writes

    async def switch(self, visit: Visit, form: Mapping[str, str]) -> web.Response:
        """Enable or disable."""
        name = f"{STRATEGIES}/{visit.request.match_info['strategy']}"
        if form.get("enabled") == "true":
            await self._admin.call(visit.principal, "EnableStrategy", pb.EnableStrategyRequest(name=name))
            done = "is enabled: it decides from the next request on"
        else:
            await self._admin.call(visit.principal, "DisableStrategy", pb.DisableStrategyRequest(name=name))
            done = "is disabled: its fallback decides from the next request on"
        return self._done(visit, f"{name.partition('/')[2]} {done}.")

    async def tune(self, visit: Visit, form: Mapping[str, str]) -> web.Response:
        """Change parameters and the fallback."""
        installed = self._installed(visit)
        parameters = struct_pb2.Struct()
        parameters.update(values_of(self._algorithm(installed).parameters_type, form, installed.config.parameters))
        strategy = pb.Strategy(
            name=f"{STRATEGIES}/{installed.config.id}",
            parameters=parameters,
            fallback_algorithm=form.get("fallback_algorithm", installed.config.fallback_algorithm),
            etag=form.get("etag", ""),
        )
        mask = FieldMask(paths=["parameters", "fallback_algorithm"])
        answer = await self._admin.call(
            visit.principal, "UpdateStrategy", pb.UpdateStrategyRequest(strategy=strategy, update_mask=mask)
        )
        return self._done(visit, f"Saved as revision {answer.strategy.revision}. The next request uses it.")

    async def roll_back(self, visit: Visit, form: Mapping[str, str]) -> web.Response:
        """Make a revision of before the newest again."""
        name, revision = f"{STRATEGIES}/{visit.request.match_info['strategy']}", form.get("revision", "")
        if not (revision.isascii() and revision.isdecimal() and len(revision) < 10):
            raise InvalidField("revision", "is no number")
        request = pb.RollbackStrategyRequest(name=name, revision=int(revision), etag=form.get("etag", ""))
        answer = await self._admin.call(visit.principal, "RollbackStrategy", request)
        return self._done(visit, f"Revision {revision} is back, as revision {answer.strategy.revision}.")

    async def bind(self, visit: Visit, form: Mapping[str, str]) -> web.Response:
        """Make or change a binding."""
        binding = pb.StrategyBinding(
            name=f"{STRATEGY_BINDINGS}/{form.get('id', '').strip()}",
            strategy=f"{STRATEGIES}/{form.get('strategy', '')}",
            tenant=_named(TENANTS, form.get("tenant", "")),
            model=_named(MODELS, form.get("model", "")),
            gpu_group=_named(GPU_GROUPS, form.get("group", "")),
            shadow=form.get("shadow") == "true",
        )
        request = pb.UpdateStrategyBindingRequest(strategy_binding=binding, allow_missing=True)
        await self._admin.call(visit.principal, "UpdateStrategyBinding", request)
        how = "watches in shadow" if binding.shadow else "decides"
        return self._done(visit, f"{form.get('strategy', '')} {how} where {form.get('id', '')} says.", bindings=True)

    async def unbind(self, visit: Visit, form: Mapping[str, str]) -> web.Response:
        """Remove a binding."""
        name = f"{STRATEGY_BINDINGS}/{form.get('id', '')}"
        await self._admin.call(visit.principal, "DeleteStrategyBinding", pb.DeleteStrategyBindingRequest(name=name))
        return self._done(visit, f"{form.get('id', '')} is removed.", bindings=True)

    # Inside

    def _installed(self, visit: Visit) -> Installed:
        return self._scheduler.registry.get(visit.request.match_info["strategy"], "strategy")

    def _algorithm(self, installed: Installed) -> Any:  # a class with Strategy's class variables
        return self._scheduler.registry.algorithms[installed.config.algorithm]

    def _card(self, installed: Installed, lately: Sequence[DecisionRow]) -> StrategyCard:
        config, now = installed.config, self._scheduler.clock()
        words = (self._algorithm(installed).__doc__ or "").strip().partition("\n")[0]
        return StrategyCard(
            installed=installed,
            algorithm_words=words,
            bindings=tuple(b for b in self._scheduler.desired.strategy_bindings if b.strategy == config.id),
            tripped=installed.tripped_until is not None and now < installed.tripped_until,
            lately=summary_of(lately),
        )

    def _done(self, visit: Visit, notice: str, *, bindings: bool = False) -> web.Response:
        visit.session.notice = notice
        strategy = visit.request.match_info.get("strategy", "")
        return see_other(f"{PREFIX}/strategies" if bindings or not strategy else f"{PREFIX}/strategies/{strategy}")


def _named(collection: str, identifier: str) -> str:
    return f"{collection}/{identifier}" if identifier else ""
