"""The commands of ``sglang-hybrid`` and what they are made of.

    serve            the launcher: checks, starts the server as a child process, shows what it does, ends it
    bench            `sglang-hybrid bench`: this host's CPU worker, and SGLang's benchmarks
    check config     the commands of these names
    arguments        what launchers read of a command line that is SGLang's
    preflight        refusals that need neither torch nor SGLang
    ports            whether a server can listen at a port, and who does
    model_files      what a model's config.json says
    console          the lines that a person sees
    run              processes of one launcher, from start to end, with everything that they leave behind
    child_process    one process in a session of its own
    guard            ends the processes of a launcher that was killed
    shared_memory    files in /dev/shm that processes leave behind
    foreground       Ctrl-C under make
    interrupts       signals that ask a launcher to end

A command's module is imported when the command runs. Nothing here imports torch or SGLang at import: a launcher
answers within a second.
"""
