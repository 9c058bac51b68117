"""The commands of ``sglang-hybrid`` and the modules that they share.

A command's module is imported only when the command runs (see ``sglang_hybrid.cli``).

    bench, check, config, checkout    commands of one file, and whether they run in a checkout
    pd/              prefill, decode and router on this machine
    model/           the catalogue of models, and the conversion of GGUF files
    profile/         tunes prediction, selection and recall for one model and budget
    eval/            measures accuracy against full attention
    report/          the papers' experiments, as one page
    top/             shows what a running server does
    doctor/          checks and measures the machine
    size/            how many requests fit on a machine, and how fast they decode
    report_problem/  collects what a bug report needs
    serve            the launcher: checks the flags, starts the server as a child process, shows its progress, ends it
    arguments        the flags of SGLang's command line that launchers read
    defaults         flags that are added to a server's command line if they are missing
    preflight        checks before the start that need neither torch nor SGLang
    ports            checks that a server can listen at a port, and finds the process that listens there
    model_files      reads a model's config.json
    console          the lines that the user sees
    run              the processes of one launcher, from start to end, and the files that they leave behind
    child_process    one process in a session of its own
    guard            ends the processes of a launcher that was killed
    shared_memory    removes files in /dev/shm that processes leave behind
    foreground       makes Ctrl-C work under make
    interrupts       signals that ask a launcher to end

No module of this folder imports torch or SGLang when it is imported, so that a launcher answers within a second.
"""
