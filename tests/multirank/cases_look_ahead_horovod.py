"""`LookAhead` against `RowExchange.exchange` in each step, over Horovod, bit for bit."""

from __future__ import annotations

from tests.multirank.cases_look_ahead import in_turns, resumed, same_as_synchronous
from tests.multirank.cases_sharded_tables import same_as_whole_tables
from tests.multirank.training import assert_same_everywhere


def case_it_is_synchronous_training_bit_for_bit() -> None:
    for bits in same_as_synchronous(6, 2):
        assert_same_everywhere(bits)


def case_it_resumes_in_mid_epoch_bit_for_bit() -> None:
    resumed(6, 3)


def case_two_of_them_take_turns() -> None:
    in_turns()


def case_sharded_tables_are_as_whole_ones_bit_for_bit() -> None:
    same_as_whole_tables(6, 1)
