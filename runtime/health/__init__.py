"""Notice a rank that dies or hangs, record the first failure, and end the job."""
