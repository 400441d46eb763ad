"""What is measured: environments, contenders and the rows made of them."""
