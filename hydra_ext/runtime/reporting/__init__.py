"""Reports of a run, figures of steps, the line that shows progress, and traces."""
