"""Why an endpoint was chosen, in words."""

from headway.routing.v1 import routing_pb2 as pb

from headway_cli.output import cell

__all__ = ["why_in_words"]


def why_in_words(decision: pb.Decision) -> str:
    """The why of a decision, in one sentence."""
    parts = [f"{decision.strategy.removeprefix('strategies/')} chose among {decision.candidates}"]
    if decision.fell_back_from:
        parts.append(
            f"standing in for {decision.fell_back_from.removeprefix('strategies/')} ({decision.fallback_reason})"
        )
    parts.append(f"{decision.matched_tokens} of {decision.prompt_tokens} prompt tokens cached")
    if decision.HasField("predicted_ttft_ms"):
        parts.append(f"predicted TTFT {cell(decision.predicted_ttft_ms)} ms")
    task = pb.TaskClass.Name(decision.task_class).removeprefix("TASK_CLASS_").lower()
    parts.append(f"task {task} of weight {decision.task_weight:g}")
    if decision.held_ms:
        parts.append(f"held {cell(decision.held_ms)} ms")
    return "; ".join(parts)
