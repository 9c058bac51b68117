"""The commands of ``sglang-hybrid``, imported when a command runs (see ``sglang_hybrid.cli``), and their parts.

    bench, check, config    commands of one file
    report/          the papers' experiments, as one page
    doctor/          checks and measures the machine
    serve            the launcher: checks, starts the server as a child process, shows what it does, ends it
    arguments        what launchers read of a command line that is SGLang's
    defaults         what a server's command line leaves out
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

Nothing here imports torch or SGLang: a launcher answers within a second.
"""
