"""What stands against an endpoint, in a cell: hard guards, then soft ones in parentheses."""

from headway.fleet.v1 import fleet_pb2
from headway.routing.v1 import routing_pb2

__all__ = ["guards_of", "guards_with_details"]


def guards_of(endpoint: fleet_pb2.EndpointState) -> list[str]:
    """By name; of an ejected one also until when."""
    hard = list(endpoint.hard_guards)
    if endpoint.HasField("ejection") and endpoint.ejection.phase == "ejected":
        until = f"ejected ({endpoint.ejection.reason}, {endpoint.ejection.remaining_s:.0f} s left)"
        hard = [until if guard == "ejected" else guard for guard in hard]
    return [*hard, *(f"({guard})" for guard in endpoint.soft_guards)]


def guards_with_details(row: routing_pb2.ExplainRow) -> list[str]:
    """Each with what closed it."""
    found = [_with_detail(row, guard) for guard in row.hard_guards]
    return found + [f"({_with_detail(row, guard)})" for guard in row.soft_guards]


def _with_detail(row: routing_pb2.ExplainRow, guard: str) -> str:
    detail = row.guard_details.get(guard, "")
    return f"{guard}: {detail}" if detail else guard
