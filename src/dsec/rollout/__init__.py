"""The main job: one step of agentic reinforcement learning over a real Python project, as a client of the SDK.

project     which project, and how its source distribution gets here (nothing of it runs on the host)
faults      edits of source text, and faults made of them
catalog     the faults that can be planted in the project, with ways to answer each
candidates  a seed -> the burst of candidate changes, each with the reward it must get
inside      the grader's test runner; the only file here that runs inside a sandbox
grading     its report -> tests passed and failed -> a reward
step        the burst over the SDK: create, change, run, grade
controls    what must come out right whatever the candidates do
report      what a person sees (or `--json`)
main        the command line; starts a one-node server where none runs
"""
