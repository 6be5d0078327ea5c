"""Templates, built by the client itself, and sandboxes of them."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
import uuid
from pathlib import Path

from case_kit import raises, run
from e2b.exceptions import BuildException

from e2b import Sandbox, Template

DOCKERFILE = """\
FROM debian
ARG WHO=world
ENV GREETING="hello $WHO"
WORKDIR /app
COPY data ./data
COPY --chown=user <<EOF /app/said
$GREETING
EOF
RUN echo "$GREETING" >made && cat data/sub/file >>made && chown user made
USER user
CMD ["sleep", "1000"]
"""


def _name():
    return f"t-{uuid.uuid4().hex[:12]}"


def _context():
    top = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, top)
    (top / "data" / "sub").mkdir(parents=True)
    (top / "data" / "sub" / "file").write_text("content\n")
    (top / "data" / "link").symlink_to("sub/file")
    (top / "data" / "skipped").write_text("not this")
    (top / ".dockerignore").write_text("data/skipped\n")
    return top


def case_a_dockerfile_becomes_a_template(_):
    name, logs = _name(), []
    template = Template(file_context_path=str(_context())).from_dockerfile(DOCKERFILE)
    assert not Template.exists(name)
    info = Template.build(template, name, cpu_count=2, memory_mb=512, on_build_logs=lambda e: logs.append(e.message))
    assert info.template_id == name
    assert Template.exists(name)
    assert any("RUN echo" in line for line in logs)
    with Sandbox.create(name) as box:
        assert box.commands.run("id -un; pwd; cat /app/made /app/said; cat /app/data/link; ls /app/data").stdout == (
            "user\n/app\nhello world\ncontent\nhello world\ncontent\nlink\nsub\n"
        )
        assert box.commands.run("stat -c %U /app/made ~user; echo $GREETING").stdout == "user\nuser\nhello world\n"
        assert box.get_info().cpu_count == 2
        assert box.get_info().memory_mb == 512
        while not any("sleep 1000" in process.args for process in box.commands.list()):
            time.sleep(0.1)  # it begins when the sandbox does, and nobody waits for it
        assert box.commands.run("id -un", user="root").stdout == "root\n"
    logs.clear()
    Template.build(template, name, on_build_logs=lambda e: logs.append(e.message))
    assert sum("as before" in line for line in logs) >= 3


def case_steps_from_a_template_with_a_program_that_is_ready(_):
    base, name, home = _name(), _name(), "/home/" + "user"
    top = _context()
    Template.build(Template().from_base_image().set_envs({"ONE": "1"}).run_cmd("echo base >/base", user="root"), base)
    template = (
        Template(file_context_path=str(top))
        .from_template(base)
        .set_envs({"TWO": "${ONE}2"})
        .set_user("user")
        .set_workdir(f"{home}/work")
        .copy("data/sub/*", "copied/")
        .copy("data/sub/file", "/opt/named", user="root", mode=0o600)
        .run_cmd(["echo $TWO >two", "touch more"])
        .make_dir("made")
        .set_start_cmd("sleep 0.3; python3 -m http.server 8123", "exec 3<>/dev/tcp/127.0.0.1/8123")
    )
    Template.build(template, name)
    with Sandbox.create(name) as box:
        out = box.commands.run("cat /base two copied/file; stat -c '%U %a' /opt/named; ls; id -un; pwd").stdout
        assert out == f"base\n12\ncontent\nroot 600\ncopied\nmade\nmore\ntwo\nuser\n{home}/work\n", out
        page = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8123/two').read())"
        assert box.commands.run(f'python3 -c "{page}"').stdout == "b'12\\n'\n"


def case_an_image_of_a_registry(_):
    name = _name()
    Template.build(Template().from_image(os.environ["TEST_IMAGE"]).run_cmd("echo built >/built", user="root"), name)
    with Sandbox.create(name) as box:
        assert box.files.read("/built") == "built\n"
        assert box.files.read("/from-image") == "yes\n"


def case_tags(_):
    name = _name()
    Template.build(Template().from_base_image().run_cmd("echo one >/v"), f"{name}:one", tags=["other"])
    assert Template.exists(f"{name}:one")
    assert not Template.exists(name)
    with Sandbox.create(f"{name}:other") as box:
        assert box.commands.run("cat /v").stdout == "one\n"


def case_builds_that_fail(_):
    failing = Template().from_base_image().set_envs({"A": "b"}).run_cmd("echo the last words; exit 3")
    error = raises(BuildException, lambda: Template.build(failing, _name()), "exit code 3")
    assert "exit 3" in str(error)
    dockerfile = Template().from_dockerfile("FROM debian\nRUN true\nRUN exit 4\n")
    raises(BuildException, lambda: Template.build(dockerfile, _name()), "exit code 4")
    unknown = Template().from_template("no-such-template").run_cmd("true")
    raises(BuildException, lambda: Template.build(unknown, _name()), "no-such-template")
    raises(BuildException, lambda: Template.build(Template().from_base_image().run_cmd("true"), "base"), "stands for")
    never = Template().from_base_image().set_start_cmd("false", "false")
    name = _name()
    Template.build(never, name)
    assert Template.exists(name)


if __name__ == "__main__":
    run(globals())
