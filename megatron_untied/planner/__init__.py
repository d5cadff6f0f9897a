"""What a run takes before it is started: memory by category and phase, the host's, disk, time.

Nothing is run: it is arithmetic on the configuration. :mod:`.geometry` has the sizes of one rank;
:mod:`.weights`, :mod:`.activations` and :mod:`.tiles` turn them into bytes, which :mod:`.step` puts
in the order of a step. :mod:`.plan` adds host memory, :mod:`.time` and the verdict for a
:mod:`.machine`; :mod:`.automatic` chooses settings that are left open, :mod:`.search` finds flags
that fit.
:mod:`.report`, :mod:`.buffer_table` and :mod:`.plot` show a plan, :mod:`.disk` counts checkpoints,
:mod:`.baselines` has the rules of published methods.
"""
