"""Any order of operations on the block manager; what they are stands in support/block_machine.py."""

from __future__ import annotations

from hypothesis import settings
from support.block_machine import BlockMachine

BlockMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=100, deadline=None)
TestBlockMachine = BlockMachine.TestCase
