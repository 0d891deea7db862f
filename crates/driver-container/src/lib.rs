//! driver-container
