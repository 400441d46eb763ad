"""Run C++ environments on the threads of this process."""
