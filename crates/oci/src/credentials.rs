//! Who we are to a registry: what docker's or podman's configuration says, helpers included.

use docker_credential::{CredentialRetrievalError, DockerCredential};
use oci_client::{Reference, secrets::RegistryAuth};
use std::{env, fs::File, io, io::BufReader, path::PathBuf};

/// Where `docker login` and `podman login` write (containers-auth.json(5)), the first that has an answer counts.
fn files() -> Vec<PathBuf> {
    let var = |name: &str| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = var("HOME");
    [
        var("REGISTRY_AUTH_FILE"),
        var("DOCKER_CONFIG").or_else(|| Some(home.clone()?.join(".docker"))).map(|dir| dir.join("config.json")),
        var("XDG_RUNTIME_DIR").map(|dir| dir.join("containers/auth.json")),
        Some(format!("/run/containers/{}/auth.json", rustix::process::getuid().as_raw()).into()),
        home.map(|home| home.join(".config/containers/auth.json")),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The credential that is configured for the registry of `image`; none is fine.
///
/// # Errors
/// A configuration or helper that is there and does not work: going on without it would fail in a way that hides why.
pub fn of(image: &Reference) -> Result<RegistryAuth, String> {
    let registry = image.resolve_registry();
    // Docker has its own registry in its configuration under the address of its first interface.
    let names = [registry.to_owned(), image.registry().to_owned(), format!("https://{registry}/v1/")];
    for path in files() {
        let shown = path.display();
        match File::open(&path) {
            Ok(_) => {}
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => continue,
            Err(e) => return Err(format!("read the credentials in {shown}: {e}")),
        }
        for name in &names {
            let Ok(file) = File::open(&path) else { continue };
            match docker_credential::get_credential_from_reader(BufReader::new(file), name) {
                Ok(DockerCredential::UsernamePassword(user, password)) => {
                    return Ok(RegistryAuth::Basic(user, password));
                }
                Ok(DockerCredential::IdentityToken(_)) => {
                    return Err(format!(
                        "use the identity token in {shown}: only user and password are understood; log in with those"
                    ));
                }
                Err(CredentialRetrievalError::NoCredentialConfigured) => {}
                // How every helper says that it knows of none (docker-credential-helpers, credentials/error.go).
                Err(CredentialRetrievalError::HelperFailure { stdout, .. })
                    if stdout.contains("credentials not found") => {}
                // Their output may hold a secret.
                Err(CredentialRetrievalError::HelperFailure { helper, .. }) => {
                    return Err(format!("ask the credential helper {helper} of {shown} about {registry}: it failed"));
                }
                Err(e) => return Err(format!("use the credentials in {shown} for {registry}: {e}")),
            }
        }
    }
    Ok(RegistryAuth::Anonymous)
}
