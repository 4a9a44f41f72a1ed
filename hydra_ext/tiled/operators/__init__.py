"""Operations on maps in strips, forward and backward."""
