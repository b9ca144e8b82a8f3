"""The processes of a rank group, and what they leave."""

import asyncio
from pathlib import Path

from cluster.driver.group_info import GroupInfo
from cluster.driver.rank_group import RankGroup
from cluster.wire.process_end import ProcessIdentity, is_running
from cluster.wire.socket_dir import PREFIX, parent_dir


def processes(info: GroupInfo) -> list[ProcessIdentity]:
    return [identity.process for identity in info.identities]


def socket_directories() -> set[Path]:
    return set(parent_dir().glob(PREFIX + "*"))


async def assert_gone(group: RankGroup, running: list[ProcessIdentity]) -> None:
    await asyncio.wait_for(group.stop(), 60)
    assert not any(is_running(process) for process in running)
    assert not socket_directories()
