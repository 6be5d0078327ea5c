"""A burst, as a trainer makes it: many sandboxes at once, used as they come, errors as values.

`python examples/burst.py [ENVIRONMENT [COUNT]]`
"""

import asyncio
import sys

import dsec


async def rollout(sandbox: dsec.AsyncSandbox) -> float | None:
    """The reward of one episode; None where the platform failed, which a trainer masks instead of scoring zero."""
    try:
        result = await sandbox.commands.run("echo 42", command_timeout_s=30)
    except dsec.PlatformError:
        return None
    return None if result.infra else float(result.stdout == "42\n")


async def main(environment: str = "debian", count: str = "16") -> None:
    async with dsec.AsyncClient() as client:
        tasks, sandboxes = [], []
        async for created in client.create_many(environment, count=int(count), deadline_s=60):
            if created.sandbox is None:
                print(f"#{created.index}: {created.error}")
                continue
            sandboxes.append(created.sandbox)
            tasks.append(asyncio.create_task(rollout(created.sandbox)))
        rewards = await asyncio.gather(*tasks)
        await client.kill_many(sandboxes)
        counted = [reward for reward in rewards if reward is not None]
        print(f"{len(sandboxes)} sandboxes, mean reward {sum(counted) / len(counted):.2f} over {len(counted)}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
