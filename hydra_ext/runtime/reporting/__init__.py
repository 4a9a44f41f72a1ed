"""What a run did: reports, figures of steps, the line that shows progress, traces."""
