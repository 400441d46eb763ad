"""What head and worker say to each other: messages, their encoding, sockets. Knows neither of them."""
