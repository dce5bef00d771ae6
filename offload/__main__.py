"""`python -m offload`: the console command `offload`."""

import sys

from offload.commands import main

sys.exit(main())
