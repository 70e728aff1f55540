"""Something that happens before a chosen step of a function's bytecode: an interrupt, or a signal handler's call."""

import sys


def at_step(number, function, action, *files):
    """Call function() and, before the step of its bytecode with this number, action(); False if it has fewer steps.

    Counted are the steps in the files of these names.
    """
    steps = 0
    before = sys.gettrace()  # that of a measurement of coverage

    def trace(frame, event, argument):
        nonlocal steps
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            steps += 1
            if steps == number:
                sys.settrace(None)
                action()
        return trace

    # Python 3.12 looks at whether any frame has asked for steps as tracing begins, and not at those that ask later.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return steps >= number


def interrupt():
    """What Ctrl-C does."""
    raise KeyboardInterrupt
