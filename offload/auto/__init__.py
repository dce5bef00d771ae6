"""Mode "auto": the controller and its ladder, the shares of all kinds, and the hooks that ask them."""
