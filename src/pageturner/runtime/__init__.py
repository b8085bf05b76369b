"""Runtime: from a plan to tokens. Packing, running, sampling and the step loop of the engine process."""
