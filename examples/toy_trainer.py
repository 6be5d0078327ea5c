"""A toy trainer that may be killed at any moment and loses nothing, keeps nothing itself, and does nothing twice.

`python examples/toy_trainer.py [ENVIRONMENT]` trains; run it again and it goes on where it stood. With `--drill` it is
its own chaos: one run is left alone, another is killed with SIGKILL at random moments, its sandboxes are paused while
no trainer is there, and it is started again each time; in the end the operations of both must be the same. What makes
it so is one key for each step: the server has the result of a step that was done, and attaches to one in flight.
"""

import argparse
import random
import signal
import subprocess
import sys
import time

import dsec

EPISODES = 3
STEPS = 12


def policy(episode: int, step: int, seen: str) -> str:
    """The next action follows from what was seen: a step that ran twice, or was lost, changes all that come after."""
    return f"{episode}.{step}.{sum(seen.encode()) % 997}"


def train(run_name: str, environment: str) -> None:
    with dsec.Client() as client:
        run = client.run(run_name)
        for episode in range(EPISODES):
            sandbox = run.sandbox(f"episode {episode}", environment)
            seen = ""
            for step in range(STEPS):
                action = policy(episode, step, seen)
                # Adding a line is nothing that one may repeat.
                command = f"sleep 0.05; echo {action} >>/tmp/actions; cksum /tmp/actions; wc -l </tmp/actions"
                seen = sandbox.commands.run(command, key=f"step {step}").check().stdout
            print(f"episode {episode}: {seen.split()[-1]} actions", flush=True)


def operations(run_name: str) -> list[tuple[str, list[str], str]]:
    """What was done to the run's sandboxes and what came of it, by their trajectories."""
    found = []
    with dsec.Client() as client:
        for info in sorted(client.list(run=run_name), key=lambda each: each.spec.name or ""):
            argv = {}
            for entry in client.connect(info.id).trajectory():
                if entry.type == "exec":
                    argv[entry.seq] = entry.data["argv"]
                elif entry.type == "result":
                    text = entry.data["stdout"]["text"]
                    found.append((info.spec.name or "", argv.pop(entry.data["exec"]), text))
            assert not argv, "every command has its result"
    return found


def drill(environment: str, seed: int, kills: int) -> None:
    rng = random.Random(seed)
    calm, killed = f"toy-calm-{seed}", f"toy-killed-{seed}"
    with dsec.Client() as client:
        try:
            train(calm, environment)
            deaths = paused = 0
            while True:
                trainer = subprocess.Popen([sys.executable, __file__, "--run", killed, environment])
                if deaths < kills:
                    time.sleep(rng.uniform(0.4, 1.4))
                    if trainer.poll() is None:
                        trainer.send_signal(signal.SIGKILL)
                if trainer.wait() == 0:
                    break
                deaths += 1
                paused += sum(error is None for error in client.pause_many(run=killed).values())
            same = operations(calm) == operations(killed)
            count = len(operations(killed))
            print(f"{deaths} deaths, {paused} pauses, {count} operations: {'the same' if same else 'DIFFERENT'}")
            if not same or count != EPISODES * STEPS:
                raise SystemExit(1)
        finally:
            for name in (calm, killed):
                client.kill_many(client.list(run=name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", nargs="?", default="debian")
    parser.add_argument("--run", default="toy-trainer")
    parser.add_argument("--drill", action="store_true")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--kills", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.drill:
        drill(arguments.environment, arguments.seed, arguments.kills)
    else:
        train(arguments.run, arguments.environment)


if __name__ == "__main__":
    main()
