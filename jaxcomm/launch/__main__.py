"""`python -m jaxcomm.launch`."""

import sys

from jaxcomm.launch._command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
