import sys

from cpu_worker.main import main

sys.exit(main())
