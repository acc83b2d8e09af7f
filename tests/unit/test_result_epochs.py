from __future__ import annotations

import pytest

from coordinator.runtime.runtime import Runtime
from store_actors.epochs.result_epochs import ResultEpochs


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_results_of_the_next_epoch_follow_the_last_answer_to_a_marker(shards: int) -> None:
    sent: list[str] = []
    order = ResultEpochs(5, shards, Runtime().threads)
    for epoch in (5, 6):
        order.emit(epoch, lambda epoch=epoch: sent.append(f"of {epoch}"))  # type: ignore[misc]
        for shard in range(shards):
            # Shards that have ended the epoch are in the next one.
            for number in range(shard):
                order.emit(epoch + 1, lambda n=(shard, number): sent.append(f"ahead {n}"))  # type: ignore[misc]
            order.emit(epoch, lambda epoch=epoch: sent.append(f"of {epoch}"))  # type: ignore[misc]
            order.end_epoch(lambda epoch=epoch: sent.append(f"end {epoch}"))  # type: ignore[misc]
    ahead = [f"ahead {(shard, number)}" for shard in range(shards) for number in range(shard)]
    first, second = ["of 5", *["of 5", "end 5"] * shards], ["of 6", *["of 6", "end 6"] * shards]
    assert sent == [*first, *ahead, *second, *ahead]
