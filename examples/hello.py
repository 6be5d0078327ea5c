"""A sandbox, a command, a file: `python examples/hello.py [ENVIRONMENT]`, while `bin/dsec serve` runs."""

import sys

import dsec


def main(environment: str = "debian") -> None:
    with dsec.Sandbox.create(environment, memory_bytes=256 << 20) as sandbox:
        result = sandbox.commands.run("echo hello; echo careful >&2; exit 3")
        print(f"exit code {result.exit_code}, said {result.stdout!r} and {result.stderr!r}")

        sandbox.files.write("/tmp/note", "written from outside")
        print(sandbox.commands.run(["cat", "/tmp/note"]).check().stdout)

        late = sandbox.commands.run("echo partial; sleep 60", command_timeout_s=0.5)
        print(f"{late.cause}, infra={late.infra}, what there was: {late.stdout!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
