"""A worker that may be killed at any time: run it twice, the second finds the first one's sandbox and result.

`python examples/resume.py [ENVIRONMENT]`; `bin/dsec kill --run example-resume` ends it.
"""

import sys

import dsec


def main(environment: str = "debian") -> None:
    with dsec.Client() as client:
        run = client.run("example-resume")
        sandbox = run.sandbox("task17/3", environment)
        # The same key again gives the recorded result; the command runs once.
        step = sandbox.commands.run("echo worked in process $$", key="step 1")
        print(f"sandbox {sandbox.id}: {step.stdout.strip()}")
        print("run this again: the line stays the same")


if __name__ == "__main__":
    main(*sys.argv[1:])
